"""Policies of published systems, rule by rule: DualMap, LMetric, Mooncake, Preble E2 and SkyWalker."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from gorgo.core.policy.interface import Candidates
from gorgo.policies import published
from gorgo.policies.published import (
    ANSWER_TOKENS,
    DualMap,
    LMetric,
    LoadWindow,
    Mooncake,
    PrebleE2,
    SkyWalker,
    mapped_rows,
)
from tests.core.routers import a_request, dispatched, make_router, submitted
from tests.policies.table import choose, request, rows_chosen, table

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


def test_the_cost_is_the_product_of_uncached_tokens_and_batch_size() -> None:
    choice = choose(LMetric(), table(3, cached=[900, 500, 0], in_flight_requests=[5, 1, 0]))
    assert choice.cost is not None
    assert choice.cost.tolist() == [100 * 6, 500 * 2, 1000 * 1]
    assert choice.row == 0


@pytest.mark.parametrize(("batch", "row"), [(8, 0), (10, 1)])
def test_a_tenth_of_the_prefill_is_worth_a_batch_ten_times_as_large(batch: int, row: int) -> None:
    assert choose(LMetric(), table(2, cached=[900, 0], in_flight_requests=[batch, 0])).row == row


def test_factors_on_either_part_change_no_choice() -> None:
    """Ten times the tokens of the same prompt shares, or an engine whose every batch is as much larger."""
    small = table(3, cached=[900, 500, 100], in_flight_requests=[8, 2, 1], prompt_tokens=1000)
    large = table(3, cached=[9000, 5000, 1000], in_flight_requests=[17, 5, 3], prompt_tokens=10_000)
    assert choose(LMetric(), small).row == choose(LMetric(), large).row == 0


def test_an_idle_replica_without_the_prefix_is_not_free() -> None:
    assert choose(LMetric(), table(2, cached=[990, 0], in_flight_requests=[3, 0])).row == 0


def test_a_prompt_that_is_cached_whole_goes_to_the_smaller_batch() -> None:
    candidates = table(3, cached=[1000, 1000, 0], in_flight_requests=[3, 2, 0])
    assert choose(LMetric(), candidates).row == 1
    empty = table(2, prompt_tokens=0, in_flight_requests=[3, 2])
    assert choose(LMetric(), empty, asked=request(prompt_tokens=0)).row == 1


def test_equal_products_go_to_the_fewest_in_flight_and_then_to_chance() -> None:
    assert choose(LMetric(), table(2, cached=[500, 0], in_flight_requests=[1, 0])).row == 1
    assert rows_chosen(LMetric(), table(2)) == {0, 1}


def test_a_longer_queue_is_worth_a_longer_prefix_token_by_token() -> None:
    assert choose(Mooncake(), table(2, cached=[900, 0], uncached_prefill_tokens=[800, 0])).row == 0
    assert choose(Mooncake(), table(2, cached=[900, 0], uncached_prefill_tokens=[1000, 0])).row == 1


def test_the_terms_are_times_at_the_throughput() -> None:
    candidates = table(2, cached=[500, 0], uncached_prefill_tokens=[2000, 0])
    choice = choose(Mooncake(), candidates, tokens_per_s=1000.0)
    assert list(choice.terms["queue"]) == [2000.0, 0.0]
    assert list(choice.terms["prefill"]) == [500.0, 1000.0]


def test_the_throughput_changes_no_choice() -> None:
    candidates = table(3, cached=[500, 100, 0], uncached_prefill_tokens=[2000, 1500, 1600])
    rows = {choose(Mooncake(), candidates, tokens_per_s=speed).row for speed in (100.0, 16_000.0, 1e6)}
    assert rows == {1}


def test_a_router_counts_what_waits_for_it_without_a_policy_that_learns() -> None:
    router = make_router("a", "b", policy="mooncake")
    requests = [a_request(f"r{number}", prompt_tokens=tokens) for number, tokens in enumerate((1000, 10, 10, 10))]
    first, *others = [dispatched(submitted(router, request, now=0.0)) for request in requests]
    assert {action.replica for action in others} == {"a", "b"} - {first.replica}
    assert others[-1].decision.terms["queue"].max() > 0.0


def engines(rows: int = 2, *, now: float = 0.0, **given: Any) -> Candidates:
    """Engines that prefill a token in a millisecond."""
    speed = {"prefill_token_s": [1e-3] * rows, "slowdown": [1.0] * rows, "token_gap_s": [0.0] * rows}
    candidates = table(rows, **speed | given)
    candidates.now = now
    return candidates


def loaded(**costs_ms: float) -> PrebleE2:
    """A policy that remembers a request of such a cost per replica, at 0 s."""
    policy = PrebleE2()
    for name, cost_ms in costs_ms.items():
        policy._window.add(f"on {name}", name.replace("_", "-"), cost_ms, now=0.0)
    return policy


@pytest.mark.parametrize(("cached", "fallback"), [(501, None), (500, "explore"), (0, "explore")])
def test_a_cache_is_exploited_where_more_of_the_prompt_is_shared_than_computed(
    cached: int, fallback: str | None
) -> None:
    policy = loaded(replica_0=300.0, replica_1=300.0, replica_2=290.0)
    choice = choose(policy, engines(3, cached=[0, cached, 0]))
    assert choice.fallback == fallback
    if fallback is None:
        assert choice.row == 1


def test_exploration_takes_the_least_load_with_the_prefill_of_the_prompt() -> None:
    choice = choose(loaded(replica_0=100.0, replica_1=450.0), engines(cached=[0, 400]))
    assert choice.terms["load"].tolist() == [100.0, 450.0]
    assert choice.terms["prefill"].tolist() == [1000.0, 600.0]
    assert choice.row == 1
    assert choose(loaded(replica_0=100.0, replica_1=550.0), engines(cached=[0, 400])).row == 0


def test_of_several_replicas_with_the_longest_match_the_least_costly_is_exploited() -> None:
    policy = loaded(replica_0=900.0, replica_1=800.0, replica_2=500.0)
    choice = choose(policy, engines(3, cached=[600, 600, 599]))
    assert (choice.row, choice.fallback) == (1, None)


@pytest.mark.parametrize(("load_ms", "row", "fallback"), [(1700.0, 1, None), (1900.0, 0, "rebalanced")])
def test_load_is_shifted_where_exploitation_costs_more_than_the_threshold(
    load_ms: float, row: int, fallback: str | None
) -> None:
    """The idle replica would take 1,000 ms for the whole prompt, the other one 200 ms behind its load."""
    choice = choose(loaded(replica_1=load_ms), engines(cached=[0, 800]))
    assert (choice.row, choice.fallback) == (row, fallback)
    assert choose(loaded(replica_1=load_ms), engines(cached=[0, 800]), balance=3.0).row == 1


def test_a_request_is_load_for_the_window_with_its_prefill_and_decoding() -> None:
    policy = PrebleE2()
    begun = engines(cached=[0, 900], token_gap_s=[0.01, 0.01])
    assert choose(policy, begun).row == 1
    for now, load_ms in ((180.0, 100.0 + 10.0 * ANSWER_TOKENS), (180.1, 0.0)):
        policy._window.drop_before(now - 180.0)
        assert policy._window.loads_ms(["replica-0", "replica-1"]).tolist() == [0.0, load_ms]


def test_a_window_and_a_threshold_set_live_act_on_the_next_choice() -> None:
    policy, late = loaded(replica_1=1900.0), engines(cached=[0, 800], now=60.0)
    assert choose(policy, late, balance=2.0).row == 0
    assert choose(policy, late, balance=3.0).row == 1
    assert choose(policy, late, window_s=60.0).terms["load"].tolist() == [0.0, 1900.0]
    assert choose(policy, late, window_s=59.0).terms["load"].tolist() == [0.0, 0.0]


def test_a_request_that_is_evaluated_again_counts_once() -> None:
    policy = PrebleE2()
    for _ in range(3):
        choice = choose(policy, engines(cached=[0, 900]))
        assert choice.terms["load"].tolist() == [0.0, 0.0], "its own load is not before it"
    assert policy._window.loads_ms(["replica-0", "replica-1"]).tolist() == [0.0, 100.0]


def test_an_unknown_time_per_token_counts_as_the_worst_known_one() -> None:
    policy = PrebleE2()
    choose(policy, engines(cached=[0, 900], token_gap_s=[0.02, float("nan")]))
    assert policy._window.loads_ms(["replica-1"]).tolist() == [100.0 + 20.0 * ANSWER_TOKENS]


def test_the_window_forgets_the_oldest_beyond_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published, "MAX_REMEMBERED", 3)
    window = LoadWindow()
    for number in range(5):
        window.add(f"r{number}", f"replica-{number}", 1.0, now=float(number))
    assert window.loads_ms([f"replica-{number}" for number in range(5)]).tolist() == [0.0, 0.0, 1.0, 1.0, 1.0]
    window.drop_before(10.0)
    assert not window._loads, "a replica without a request has no entry"


#: Two replicas in each of three regions.
RTT_S = [0.002, 0.003, 0.095, 0.096, 0.180, 0.181]


def regions(**given: Any) -> Any:
    return table(6, rtt_s=RTT_S, **{"decoding_requests": [0.0] * 6, "queued_requests": [0.0] * 6} | given)


def test_the_near_region_serves_while_one_of_its_replicas_is_free_whatever_is_cached_elsewhere() -> None:
    choice = choose(SkyWalker(), regions(cached=[0, 64, 1000, 0, 0, 0], in_flight_requests=[1, 0, 0, 0, 0, 0]))
    assert (choice.row, choice.fallback) == (1, None)


def test_of_the_free_near_replicas_the_one_with_the_longest_match_serves_then_the_least_loaded() -> None:
    load = [9.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    decoding = {"in_flight_requests": load, "decoding_requests": load}
    assert choose(SkyWalker(), regions(cached=[640, 64, 0, 0, 0, 0], **decoding)).row == 0
    assert choose(SkyWalker(), regions(cached=[64, 64, 0, 0, 0, 0], **decoding)).row == 1
    assert rows_chosen(SkyWalker(), regions()) == {0, 1}


@pytest.mark.parametrize(("cached", "row"), [([900, 900, 0, 320, 640, 0], 4), ([900, 900, 0, 64, 64, 0], 3)])
def test_without_a_free_near_replica_the_region_with_the_longest_match_serves_the_nearest_of_equals(
    cached: list[int], row: int
) -> None:
    choice = choose(SkyWalker(), regions(cached=cached, in_flight_requests=[1, 1, 0, 0, 0, 0]))
    assert (choice.row, choice.fallback) == (row, "remote")


def test_another_region_serves_by_its_free_replicas_alone() -> None:
    choice = choose(SkyWalker(), regions(cached=[0, 0, 640, 0, 64, 0], in_flight_requests=[1, 1, 1, 0, 0, 0]))
    assert (choice.row, choice.fallback) == (4, "remote"), "the replica of the longest match is not free"


def test_where_no_replica_is_free_the_near_one_with_the_fewest_pending_serves() -> None:
    choice = choose(SkyWalker(), regions(cached=[900] * 6, in_flight_requests=[3, 2, 1, 1, 1, 1]))
    assert (choice.row, choice.fallback) == (1, "pending")


def test_a_reported_queue_is_pending_too_and_requests_that_decode_are_not() -> None:
    reported = choose(SkyWalker(), regions(queued_requests=[0.0, 2.0, 0.0, 0.0, 0.0, 0.0], cached=[0, 640, 0, 0, 0, 0]))
    assert reported.row == 0
    decoding = regions(in_flight_requests=[4.0, 5.0, 0, 0, 0, 0], decoding_requests=[4.0, 5.0, 0, 0, 0, 0])
    assert choose(SkyWalker(), decoding).fallback is None


def test_near_ms_says_how_far_apart_a_region_s_replicas_are() -> None:
    busy = regions(in_flight_requests=[1, 1, 0, 0, 0, 0], cached=[0, 0, 0, 0, 0, 640])
    assert choose(SkyWalker(), busy, near_ms=100.0).fallback is None
    assert choose(SkyWalker(), busy, near_ms=10.0).row == 5


def test_a_router_pushes_a_burst_across_regions_as_near_replicas_fill() -> None:
    router = make_router("a", "b", policy="skywalker")
    for name, rtt_s in (("a", 0.001), ("b", 0.1)):
        router.replicas.on_probe(name, rtt_s, now=0.0)
    burst = [dispatched(submitted(router, a_request(f"r{number}"), now=1.0)) for number in range(3)]
    assert [(one.replica, one.decision.fallback) for one in burst] == [("a", None), ("b", "remote"), ("a", "pending")]
    router.on_first_token(burst[0].attempt_id, now=1.5)
    router.on_first_token(burst[2].attempt_id, now=1.5)
    again = dispatched(submitted(router, a_request("r9"), now=2.0))
    assert (again.replica, again.decision.fallback) == ("a", None)
