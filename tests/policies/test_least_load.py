from __future__ import annotations

import numpy as np
import pytest

from gorgo.core.policy.interface import Policy
from gorgo.policies.least_load import LeastLoad, LeastLoadFirstToken
from tests.policies.table import choose, rows_chosen, table

both = pytest.mark.parametrize("policy", [LeastLoad(), LeastLoadFirstToken()], ids=lambda policy: policy.name)


@pytest.mark.parametrize(
    ("policy", "cost", "row"), [(LeastLoad(), [8105, 6001], 1), (LeastLoadFirstToken(), [5105, 6001], 0)]
)
def test_a_prompt_counts_until_it_ends_or_until_its_first_token(policy: Policy, cost: list[float], row: int) -> None:
    """The first replica decodes three requests of 1,000 tokens and has 100 tokens before their first token."""
    candidates = table(
        2,
        in_flight_requests=[4, 0],
        in_flight_tokens=[3100, 0],
        queued_prefill_tokens=[100, 0],
        running_requests=[3, 1],
        queued_requests=[2, 0],
        used_tokens=[5000, 6000],
    )
    choice = choose(policy, candidates)
    assert choice.cost is not None
    np.testing.assert_allclose(choice.cost, cost)
    assert choice.row == row


@both
def test_unknown_figure_counts_as_the_worst_known_one(policy: Policy) -> None:
    choice = choose(policy, table(3, used_tokens=[np.nan, 100, 900]))
    assert choice.terms["used"][0] == 900
    assert choice.row == 1


@both
def test_own_count_decides_when_no_engine_tells_anything(policy: Policy) -> None:
    waiting = [50, 40, 60]
    assert choose(policy, table(3, queued_prefill_tokens=waiting, in_flight_tokens=waiting)).row == 1


def test_equal_loads_fall_at_random_as_released_whatever_the_requests_in_flight() -> None:
    candidates = table(3, in_flight_tokens=[100, 100, 200], in_flight_requests=[2, 1, 1])
    assert rows_chosen(LeastLoad(), candidates) == {0, 1}
