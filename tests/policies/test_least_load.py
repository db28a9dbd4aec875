""""""

from __future__ import annotations

import numpy as np
import pytest

from gorgo.core.policy.interface import Policy
from gorgo.core.policy.weights import Weights
from gorgo.policies.least_load import LeastLoad, LeastLoadFirstToken, LeastRequest, LeastRequestInFlight, PowerOfTwo
from tests.policies.table import choose, request, rows_chosen, table

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


both_kinds = pytest.mark.parametrize("policy", [LeastRequest(), LeastRequestInFlight()], ids=lambda policy: policy.name)


@both_kinds
def test_takes_the_fewest_in_flight(policy: Policy) -> None:
    assert choose(policy, table(3, in_flight_requests=[4, 1, 2])).row == 1


@both_kinds
def test_ties_fall_at_random(policy: Policy) -> None:
    assert rows_chosen(policy, table(3, in_flight_requests=[0, 1, 0])) == {0, 2}


def test_the_larger_of_reported_and_own_count_decides_as_released() -> None:
    """Another proxy's requests are in the report alone; those dispatched since the scrape in the own count alone."""
    candidates = table(3, in_flight_requests=[0, 5, 2], running_requests=[6, 1, 4])
    choice = choose(LeastRequest(), candidates)
    assert choice.cost is not None
    assert choice.cost.tolist() == [6, 5, 4]
    assert choice.row == 2
    assert choose(LeastRequestInFlight(), candidates).row == 0


def test_an_unknown_report_counts_as_the_worst_known_one() -> None:
    candidates = table(3, in_flight_requests=[0, 1, 1], running_requests=[np.nan, 3, 2])
    assert choose(LeastRequest(), candidates).row == 2


def test_never_takes_the_most_loaded_when_another_is_less_loaded() -> None:
    assert rows_chosen(PowerOfTwo(), table(3, in_flight_requests=[1, 2, 3])) == {0, 1}


def test_takes_the_less_loaded_of_two() -> None:
    assert rows_chosen(PowerOfTwo(), table(2, in_flight_requests=[5, 4])) == {1}


def test_each_pair_is_drawn_as_often_and_a_tie_falls_on_either() -> None:
    """Of three, each pair is a third of the draws; the least loaded is in two of them."""
    rows = [choose(PowerOfTwo(), table(3, in_flight_requests=[1, 2, 3]), seed=seed).row for seed in range(600)]
    assert rows.count(0) / 600 == pytest.approx(2 / 3, abs=0.06)
    assert rows.count(1) / 600 == pytest.approx(1 / 3, abs=0.06)
    equal = [choose(PowerOfTwo(), table(3), seed=seed).row for seed in range(600)]
    assert [equal.count(row) / 600 for row in range(3)] == pytest.approx([1 / 3] * 3, abs=0.06)


def test_one_replica_is_no_choice_and_takes_no_draw() -> None:
    rng = np.random.default_rng(0)
    policy, candidates = PowerOfTwo(), table(1)
    assert policy.choose(request(), candidates, Weights.of(()), rng).row == 0
    assert rng.random() == np.random.default_rng(0).random()


def test_reaches_all_when_they_are_equal() -> None:
    assert rows_chosen(PowerOfTwo(), table(4)) == {0, 1, 2, 3}
