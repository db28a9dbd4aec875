"""`prefix-cache` as released: by the running requests of the last scrape, and by the best matches only."""

from __future__ import annotations

import statistics

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gorgo.policies.prefix_cache import PrefixCache, PrefixCacheInFlight
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
