"""`prefix-cache` as released: by the running requests of the last scrape, and by the best matches only."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.core.policy.interface import Policy
from gorgo.policies.prefix_cache import (
    LoadPrefix,
    PrefixCache,
    PrefixCacheAndLoad,
    PrefixCacheInFlight,
    PrefixThreshold,
)
from tests.policies.table import choose, rows_chosen, table


def test_takes_the_longest_match_however_old_the_report_and_many_the_requests_in_flight() -> None:
    """Between two scrapes the reports show no load: a popular prefix draws everything to its replica."""
    candidates = table(3, cached=[500, 400, 0], running_requests=[2, 2, 2], in_flight_requests=[40, 2, 2])
    assert choose(PrefixCache(), candidates).row == 0
    assert choose(PrefixCacheInFlight(), candidates).fallback == "imbalance"


def test_equal_matches_go_to_the_fewest_running_as_reported_and_then_to_chance() -> None:
    candidates = table(4, cached=[500, 500, 500, 0], running_requests=[4, 1, 1, 0], in_flight_requests=[0, 5, 0, 0])
    assert rows_chosen(PrefixCache(), candidates) == {1, 2}


def test_a_shorter_match_never_serves() -> None:
    """AIBrix's rule goes on to the next match where the best is overloaded; the released one does not."""
    load = [8, 0, 0, 0, 0, 0, 0, 0]  # mean 1, sd 2.83: the best match lies above mean + 2 sd
    candidates = table(8, cached=[500, 400, 0, 0, 0, 0, 0, 0], running_requests=load, in_flight_requests=load)
    assert choose(PrefixCache(), candidates).row == 0
    assert choose(PrefixCacheInFlight(), candidates).row == 1


def test_reports_that_differ_by_more_than_8_requests_outweigh_any_match() -> None:
    at_limit = table(3, cached=[500, 0, 0], running_requests=[8, 0, 0])
    over = table(3, cached=[500, 0, 0], running_requests=[9, 0, 0], in_flight_requests=[0, 3, 1])
    assert choose(PrefixCache(), at_limit).row == 0
    choice = choose(PrefixCache(), over)
    assert (choice.row, choice.fallback) == (2, "imbalance")


def test_without_a_match_the_larger_of_reported_and_own_count_decides() -> None:
    choice = choose(PrefixCache(), table(3, running_requests=[1, 3, 2], in_flight_requests=[4, 0, 1]))
    assert (choice.row, choice.fallback) == (2, "no_match")


@given(
    rows=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8),
    seed=st.integers(0, 1000),
)
def test_chooses_as_the_release_does_with_its_threshold(rows: list[tuple[int, int, int]], seed: int) -> None:
    cached, running, own = ([row[place] for row in rows] for place in range(3))
    candidates = table(len(rows), cached=cached, running_requests=running, in_flight_requests=own)
    assert choose(PrefixCache(), candidates, seed=seed).row in _released(cached, running, own)


def _released(cached: list[int], running: list[int], own: list[int]) -> set[int]:
    """Naive twin: the rows that the released rule may answer, threshold included."""
    load = [max(pair) for pair in zip(running, own, strict=True)]
    if max(running) - min(running) > 8 or max(cached) == 0:
        return {row for row, count in enumerate(load) if count == min(load)}
    deviation = statistics.stdev(running) if len(running) > 1 else 0.0
    best = [row for row, tokens in enumerate(cached) if tokens == max(cached)]
    pool = [row for row in best if running[row] <= statistics.mean(running) + 2.0 * deviation] or best
    return {row for row in pool if running[row] == min(running[one] for one in pool)}


def test_unknown_reports_count_as_the_worst_known() -> None:
    candidates = table(3, cached=[500, 500, 0], running_requests=[np.nan, 4, 2], in_flight_requests=[0, 0, 0])
    assert rows_chosen(PrefixCache(), candidates) == {0, 1}


def test_the_cost_is_the_sum_of_three_shares() -> None:
    candidates = table(
        3,
        cached=[500, 0, 250],
        queued_requests=[4, 2, 0],
        used_tokens=[100, 50, 200],
        kv_capacity_tokens=[1000, 100, 1000],
    )
    choice = choose(LoadPrefix(), candidates)
    terms = {name: list(column) for name, column in choice.terms.items()}
    assert terms == {"prefix": [0.5, 1.0, 0.75], "queue": [1.0, 0.5, 0.0], "kv": [0.1, 0.5, 0.2]}
    assert choice.row == 2


def test_the_weights_turn_a_choice() -> None:
    candidates = table(
        2, cached=[600, 0], queued_requests=[0, 0], used_tokens=[900, 100], kv_capacity_tokens=[1000, 1000]
    )
    assert choose(LoadPrefix(), candidates).row == 1
    assert choose(LoadPrefix(), candidates, prefix=3.0, queue=2.0, kv=2.0).row == 0


def test_one_request_more_in_the_queue_weighs_as_much_as_a_hundred_where_it_is_the_longest() -> None:
    """The scorer compares places, not lengths."""
    costs = [choose(LoadPrefix(), table(2, queued_requests=[0, longest])).cost for longest in (1, 100)]
    np.testing.assert_array_equal(costs[0], costs[1])


def test_ties_fall_at_random_whatever_is_in_flight() -> None:
    assert rows_chosen(LoadPrefix(), table(3, in_flight_requests=[9, 0, 5])) == {0, 1, 2}


def test_a_pool_of_unknown_size_counts_as_the_fullest_known_and_none_as_more_than_full() -> None:
    pools = [np.nan, 100.0, 100.0]
    choice = choose(LoadPrefix(), table(3, used_tokens=[50, 30, 250], kv_capacity_tokens=pools))
    assert list(choice.terms["kv"]) == [1.0, pytest.approx(0.3), 1.0]


def test_takes_the_longest_match_above_the_threshold_whatever_the_load() -> None:
    choice = choose(PrefixThreshold(), table(3, cached=[0, 700, 600], in_flight_requests=[0, 99, 0]))
    assert (choice.row, choice.fallback) == (1, None)


def test_takes_the_least_loaded_at_the_threshold_and_below() -> None:
    choice = choose(PrefixThreshold(), table(3, cached=[0, 500, 400], in_flight_requests=[1, 2, 0]))
    assert (choice.row, choice.fallback) == (2, "below_threshold")


def test_the_threshold_can_be_set() -> None:
    candidates = table(2, cached=[0, 300], in_flight_requests=[0, 5])
    assert choose(PrefixThreshold(), candidates, tau=0.2).row == 1
    assert choose(PrefixThreshold(), candidates, tau=0.4).row == 0


def test_at_1_the_least_loaded_serves_even_a_prompt_that_is_cached_as_a_whole() -> None:
    choice = choose(PrefixThreshold(), table(2, cached=[0, 1000], in_flight_requests=[0, 5]), tau=1.0)
    assert (choice.row, choice.fallback) == (0, "below_threshold")


# `prefix-cache-in-flight` and `prefix-cache-and-load` have one rule and differ in the load that is too much.


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
