from __future__ import annotations

from gorgo.policies.prefix_threshold import PrefixThreshold
from tests.policies.table import choose, table


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
