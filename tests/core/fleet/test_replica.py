"""A counter that went back is another process, whichever counter it is."""

from __future__ import annotations

import pytest

from gorgo.core.fleet.replica import RestartDetector
from gorgo.core.messages.request import EngineSample

TAKEN, COMPUTED = "prompt_tokens_total", "prefill_tokens_total"


@pytest.mark.parametrize(
    ("scrapes", "seen"),
    [
        ([{TAKEN: 900.0}, {TAKEN: 900.0}, {}, {TAKEN: 20.0}], [False, False, False, True]),
        ([{COMPUTED: 900.0}, {COMPUTED: 899.0}], [False, True]),
        ([{TAKEN: 900.0, COMPUTED: 500.0}, {TAKEN: 901.0, COMPUTED: 10.0}], [False, True]),
        ([{TAKEN: 900.0}, {COMPUTED: 10.0}, {TAKEN: 900.0, COMPUTED: 10.0}], [False, False, False]),
        ([{TAKEN: 900.0}, {TAKEN: 0.0}, {TAKEN: 5.0}, {TAKEN: 4.0}], [False, True, False, True]),
        ([{TAKEN: 0.0}, {TAKEN: 0.0}], [False, False]),
    ],
)
def test_counters_only_grow_while_a_process_lives(scrapes: list[dict[str, float]], seen: list[bool]) -> None:
    restarts = RestartDetector()
    assert [restarts.observe(EngineSample(**told)) for told in scrapes] == seen
    assert restarts.count == sum(seen)
