"""`prefix-cache-in-flight` and `prefix-cache-and-load` have one rule and differ in the load that is too much."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.core.policy.interface import Policy
from gorgo.policies.prefix_cache import PrefixCacheAndLoad, PrefixCacheInFlight
from tests.policies.table import choose, rows_chosen, table

both = pytest.mark.parametrize("policy", [PrefixCacheInFlight(), PrefixCacheAndLoad()], ids=lambda policy: policy.name)


@both
def test_takes_the_longest_match(policy: Policy) -> None:
    choice = choose(policy, table(3, cached=[10, 500, 400], in_flight_requests=[1, 1, 0]))
    assert (choice.row, choice.fallback) == (1, None)


@both
def test_equal_matches_go_to_the_fewest_in_flight(policy: Policy) -> None:
    assert choose(policy, table(3, cached=[500, 500, 0], in_flight_requests=[2, 1, 2])).row == 1


@both
def test_without_a_match_the_least_loaded_serves(policy: Policy) -> None:
    choice = choose(policy, table(3, in_flight_requests=[2, 1, 3]))
    assert (choice.row, choice.fallback) == (1, "no_match")


@both
def test_a_difference_of_more_than_8_requests_outweighs_any_match(policy: Policy) -> None:
    at_limit, over = [8, 8, 8, 0], [9, 9, 9, 0]
    assert choose(policy, table(4, cached=[1000, 0, 0, 0], in_flight_requests=at_limit)).row == 0
    choice = choose(policy, table(4, cached=[1000, 0, 0, 0], in_flight_requests=over))
    assert (choice.row, choice.fallback) == (3, "imbalance")


@both
def test_equal_loads_shut_out_nobody(policy: Policy) -> None:
    """The mean of equal numbers may round to less than each of them."""
    assert choose(policy, table(3, cached=[0, 0, 9], in_flight_requests=[0.1, 0.1, 0.1])).row == 2


def test_one_standard_deviation_counts_as_too_much_for_lodestar_and_not_for_aibrix() -> None:
    load = [4, 0, 0, 0]  # mean 1, standard deviation 2 (over n - 1): 4 lies above mean + sd, below mean + 2 sd
    candidates = table(4, cached=[1000, 300, 0, 0], in_flight_requests=load)
    assert choose(PrefixCacheInFlight(), candidates).row == 0
    assert choose(PrefixCacheAndLoad(), candidates).row == 1


def test_the_deviation_is_that_of_a_sample() -> None:
    """Over n - 1 as in AIBrix, mean + sd is 3.88; over n it is 3.67."""
    load = [3.7, 2.4, 3, 0]
    assert np.mean(load) + np.std(load) < 3.7 < np.mean(load) + np.std(load, ddof=1)
    candidates = table(4, cached=[1000, 300, 0, 0], in_flight_requests=load)
    assert choose(PrefixCacheAndLoad(), candidates).row == 0


def test_when_every_match_is_overloaded_the_least_loaded_serves_at_random() -> None:
    candidates = table(4, cached=[1000, 0, 0, 0], in_flight_requests=[4, 0, 0, 0])
    assert choose(PrefixCacheAndLoad(), candidates).fallback == "overloaded"
    assert rows_chosen(PrefixCacheAndLoad(), candidates) == {1, 2, 3}


@both
@given(
    rows=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), min_size=1, max_size=8), seed=st.integers(0, 1000)
)
def test_the_walk_answers_as_written_in_the_papers(policy: Policy, rows: list[tuple[int, int]], seed: int) -> None:
    cached, load = [match * 100 for match, _ in rows], [count for _, count in rows]
    row = choose(policy, table(len(rows), cached=cached, in_flight_requests=load), seed=seed).row
    assert row in _walk(cached, load, deviations=2 if policy.name == "prefix-cache-in-flight" else 1)


def _walk(cached: list[int], load: list[int], *, deviations: float) -> set[int]:
    """Naive twin: the rows that the papers' walk may answer."""
    least = {row for row in range(len(load)) if load[row] == min(load)}
    if max(load) - min(load) > 8:
        return least
    limit = np.mean(load) + deviations * (np.std(load, ddof=1) if len(load) > 1 else 0.0) + 1e-9
    order = sorted((row for row in range(len(load)) if cached[row]), key=lambda row: (-cached[row], load[row]))
    for row in order:
        if load[row] <= limit:
            return {other for other in order if (cached[other], load[other]) == (cached[row], load[row])}
    return least
