from __future__ import annotations

from collections import Counter

import numpy as np

from gorgo.policies.dualmap import DualMap, mapped_rows
from tests.policies.table import choose, request, table

#: The pair of the key that `request` has, in a table of eight replicas.
FIRST, SECOND = mapped_rows(table(8).salt, 7)


def at(values: dict[int, float], *, others: float) -> list[float]:
    return [values.get(row, others) for row in range(8)]


def test_each_prefix_is_mapped_to_two_different_replicas() -> None:
    salt = table(8).salt
    assert all(len(set(mapped_rows(salt, key))) == 2 for key in range(500))
    assert mapped_rows(salt[:1], 7) == (0,)


def test_prefixes_are_spread_evenly_and_the_two_hashes_are_independent() -> None:
    pairs = Counter(mapped_rows(table(8).salt, key * 0x9E3779B97F4A7C15) for key in range(11_200))
    assert len(pairs) == 8 * 7
    assert max(abs(count - 200) for count in pairs.values()) < 70


def test_a_replica_that_leaves_moves_only_the_prefixes_that_were_mapped_to_it() -> None:
    salt = table(8).salt
    for key in range(300):
        before = [int(salt[row]) for row in mapped_rows(salt, key)]
        after = [int(salt[:7][row]) for row in mapped_rows(salt[:7], key)]
        if int(salt[7]) not in before:
            assert after == before


def test_the_one_of_the_two_with_more_in_cache_serves_whatever_others_have() -> None:
    candidates = table(8, cached=at({FIRST: 200, SECOND: 600}, others=1000), in_flight_requests=at({}, others=0))
    choice = choose(DualMap(), candidates)
    assert (choice.row, choice.fallback) == (SECOND, None)
    assert choice.terms["prefill"][SECOND] == 400 * 1e3 / 16_000


def test_of_two_with_as_much_in_cache_the_one_that_is_expected_sooner_serves() -> None:
    waiting = at({FIRST: 900.0, SECOND: 100.0}, others=0.0)
    assert choose(DualMap(), table(8, uncached_prefill_tokens=waiting)).row == SECOND


def test_beyond_the_objective_the_sooner_of_the_two_serves() -> None:
    waiting = at({FIRST: 3000.0, SECOND: 100.0}, others=0.0)
    candidates = table(8, cached=at({FIRST: 900}, others=0), uncached_prefill_tokens=waiting)
    kept = choose(DualMap(), candidates, tokens_per_s=1000.0, slo_ms=3100.0)
    assert (kept.row, kept.fallback) == (FIRST, None)
    moved = choose(DualMap(), candidates, tokens_per_s=1000.0, slo_ms=3099.0)
    assert (moved.row, moved.fallback) == (SECOND, "slo")


def test_a_request_moves_from_a_pair_of_hot_replicas_to_the_soonest_of_all() -> None:
    cool = next(row for row in range(8) if row not in (FIRST, SECOND))
    waiting = at({FIRST: 4000.0, SECOND: 5000.0, cool: 10.0}, others=50.0)
    candidates = table(8, cached=at({FIRST: 900}, others=0), uncached_prefill_tokens=waiting)
    choice = choose(DualMap(), candidates, tokens_per_s=1000.0)
    assert (choice.row, choice.fallback) == (cool, "hotspot")


def test_an_unknown_queue_counts_as_the_worst_known_one() -> None:
    candidates = table(2, uncached_prefill_tokens=[np.nan, 100.0])
    assert choose(DualMap(), candidates).terms["queue"].tolist() == [6.25, 6.25]


def test_prompts_of_one_beginning_have_one_pair_and_the_sessions_do_not_matter() -> None:
    rows = {choose(DualMap(), table(8), asked=request(session_id=str(number)), seed=number).row for number in range(50)}
    assert rows == {FIRST, SECOND}
