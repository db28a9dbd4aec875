from __future__ import annotations

import numpy as np

from gorgo.policies.least_load import LeastLoad
from tests.policies.table import choose, table


def test_adds_own_count_and_scraped_figures() -> None:
    candidates = table(
        2, queued_prefill_tokens=[100, 0], running_requests=[3, 1], queued_requests=[2, 0], used_tokens=[5000, 6000]
    )
    choice = choose(LeastLoad(), candidates)
    assert choice.cost is not None
    np.testing.assert_allclose(choice.cost, [5105, 6001])
    assert choice.row == 0


def test_unknown_figure_counts_as_the_worst_known_one() -> None:
    choice = choose(LeastLoad(), table(3, used_tokens=[np.nan, 100, 900]))
    assert choice.terms["used"][0] == 900
    assert choice.row == 1


def test_own_count_decides_when_no_engine_tells_anything() -> None:
    assert choose(LeastLoad(), table(3, queued_prefill_tokens=[50, 40, 60])).row == 1
