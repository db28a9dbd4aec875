"""What a dispatch writes down at the replica, and what the ends of attempts say about the prefix index."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from gorgo.core.dispatch.dispatcher import LARGE, can_sample, sample_candidates
from gorgo.core.fleet.eligibility import CandidateSet
from gorgo.core.fleet.fleet import Fleet
from gorgo.core.fleet.replica import Columns, ReplicaSpec
from gorgo.core.limits import OutlierLimits, RouterLimits
from gorgo.core.messages.actions import Dispatch
from gorgo.core.messages.request import EngineSample
from gorgo.core.prefix.residency import LEAST_REPORTS
from gorgo.core.router import Router
from gorgo.policies.registry import POLICIES, make_policy
from tests.core.routers import (
    COMPLETED,
    FAILED,
    GONE,
    PROMPT,
    a_request,
    dispatched,
    fail_on,
    make_parts,
    make_router,
    specs,
    submitted,
)

# --- What a dispatch writes down at the replica, and the replicas it names behind it.


def test_a_dispatch_to_a_half_open_replica_is_its_one_trial_until_that_attempt_ends() -> None:
    router = make_router("a", "b")
    fail_on(router, FAILED, 5)
    router.handle_timer(now=6.0)
    trial = dispatched(submitted(router, a_request("trial"), now=6.0))
    assert [
        trial.replica,
        *(dispatched(submitted(router, a_request(f"beside-{n}"), now=6.0)).replica for n in range(3)),
    ] == ["a", "b", "b", "b"]
    router.on_finish(trial.attempt_id, GONE, now=6.5)
    assert dispatched(submitted(router, a_request("next"), now=6.5)).replica == "a"


def fallbacks(policy: str, count: int, *busy: str) -> tuple[str, tuple[str, ...]]:
    """Return the replica and its fallbacks of a request while `busy` replicas each have another."""
    router = make_router("a", "b", "c", "d", policy=policy, limits=RouterLimits(fallbacks=count))
    for number, name in enumerate(busy):
        submitted(router, a_request(f"busy-{number}", pinned_replica=name, prompt_tokens=10_000), now=0.0)
    router.replicas.drain("d", now=0.5)
    sent = dispatched(submitted(router, a_request(), now=1.0))
    return sent.replica, sent.fallbacks


@pytest.mark.parametrize(
    ("policy", "busy", "replica", "expected"),
    [
        ("nearest", (), "a", ("b", "c")),  # the farther the dearer
        ("gorgo-ms", ("a", "b"), "c", ("a", "b")),  # a is nearer, with as much work
        ("least-request-in-flight", ("a", "a", "b"), "c", ("b", "a")),
        ("round-robin", ("a", "a", "c"), "a", ("b", "c")),  # without a cost, by requests in flight
    ],
)
def test_the_next_best_candidates_are_the_fallbacks(
    policy: str, busy: tuple[str, ...], replica: str, expected: tuple[str, ...]
) -> None:
    assert fallbacks(policy, 2, *busy) == (replica, expected)
    assert fallbacks(policy, 1, *busy) == (replica, expected[:1])
    assert fallbacks(policy, 9, *busy) == (replica, expected), "the draining one is none"


def test_there_are_no_fallbacks_where_the_router_retries_by_itself() -> None:
    assert fallbacks("gorgo-ms", 0) == ("a", ())
    assert RouterLimits().fallbacks == 0


def test_the_number_of_fallbacks_changes_with_the_limits() -> None:
    router = make_router("a", "b", "c")
    router.settings.set_limits(RouterLimits(fallbacks=1), now=0.0)
    assert dispatched(submitted(router, a_request(), now=1.0)).fallbacks == ("b",)


COUNT, MOST = 400, 16


def fleet(count: int = COUNT) -> Fleet:
    made = Fleet(stale_after_s=90.0, rtt_ewma_alpha=0.3, panic_threshold=0.5, ejection=OutlierLimits())
    made.replace([ReplicaSpec(f"r{number}", "here") for number in range(count)])
    return made


def drawn(columns: Columns, eligible: CandidateSet, matched: dict[int, float], *, seed: int = 0) -> set[int]:
    """Return the slots of a sample."""
    cached = np.zeros(len(columns.salt))
    for slot, tokens in matched.items():
        cached[slot] = tokens
    made = sample_candidates(eligible, columns, cached, most=MOST, rng=np.random.default_rng(seed))
    assert len(made.names) == len(made.slots) == len(made.replicas) <= MOST
    assert [replica.slot for replica in made.replicas] == made.slots.tolist() == sorted(made.slots.tolist())
    assert made.names == tuple(replica.spec.name for replica in made.replicas)
    assert (made.is_all, made.excluded, made.sampled_from) == (False, eligible.excluded, len(eligible.names))
    return set(made.slots.tolist())


@pytest.mark.parametrize("seed", range(5))
def test_the_deepest_prefix_owners_and_the_least_loaded_are_always_in_the_sample(seed: int) -> None:
    made = fleet()
    made.columns.in_flight_requests[:] = 5.0
    made.columns.in_flight_requests[[7, 200]] = 0.0
    made.columns.in_flight_requests[300] = 1.0
    eligible = made.eligibility.for_model(None)
    shallow = dict.fromkeys(range(100), 64.0)
    found = drawn(made.columns, eligible, {**shallow, 398: 6400.0, 399: 640.0}, seed=seed)
    assert {398, 399, 7, 200, 300} <= found
    assert len(found) > 10, "and others by chance"


def test_of_more_equal_ones_than_fit_each_is_as_likely() -> None:
    made = fleet()
    eligible = made.eligibility.for_model(None)
    owners = dict.fromkeys(range(0, COUNT, 2), 640.0)
    counts = Counter(slot for seed in range(500) for slot in drawn(made.columns, eligible, owners, seed=seed))
    even = [counts[slot] for slot in range(0, COUNT, 2)]
    odd = [counts[slot] for slot in range(1, COUNT, 2)]
    assert min(even) > 0
    assert min(odd) > 0
    assert 1.3 < np.mean(even) / np.mean(odd) < 1.9  # 14 against 10 in the mean: owners twice drawn count once
    assert max(even) < 3 * np.mean(even)


def test_only_candidates_are_drawn() -> None:
    made = fleet()
    for number in range(0, COUNT, 2):
        made.drain(f"r{number}", True, now=0.0)
    eligible = made.eligibility.for_model(None)
    for seed in range(20):
        assert all(slot % 2 for slot in drawn(made.columns, eligible, {0: 640.0, 1: 64.0}, seed=seed))
        assert 1 in drawn(made.columns, eligible, {0: 640.0, 1: 64.0}, seed=seed)


def router_of(count: int, policy: str, most: int) -> Router:
    names = [f"r{number}" for number in range(count)]
    limits = RouterLimits(sampled_replicas=most)
    return Router(specs(*names), make_policy(policy), rng=np.random.default_rng(0), boot_id="b", limits=limits)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_large_fleets_are_sampled_under_policies_with_a_cost(policy: str) -> None:
    for count in (LARGE * 4, LARGE * 4 + 1):
        router = router_of(count, policy, 4)
        decision = dispatched(submitted(router, a_request(), now=0.0)).decision
        if count > LARGE * 4 and can_sample(make_policy(policy)):
            assert 1 <= len(decision.candidates) <= 4
            assert decision.sampled_from == count
        else:
            assert len(decision.candidates) == count
            assert decision.sampled_from is None


def test_policies_by_hash_turn_or_distance_compare_all() -> None:
    compared = {name for name in POLICIES if can_sample(make_policy(name))}
    assert {"gorgo", "gorgo-ms", "least-load", "least-request", "load-prefix", "lodestar"} <= compared
    assert not compared & {"nearest", "round-robin", "random", "simple-session-affinity", "multi-depth"}


def test_a_policy_that_does_not_read_the_index_gets_no_owners() -> None:
    shares = {}
    for policy in ("least-request", "gorgo"):
        router = router_of(1000, policy, 8)
        router.index.confirm(PROMPT, 500)
        sent = [dispatched(submitted(router, a_request(f"{n}", blocks=PROMPT), now=0.0)).decision for n in range(50)]
        shares[policy] = sum("r500" in decision.candidates for decision in sent)
    assert shares["least-request"] < 10
    assert shares["gorgo"] > 10


def test_a_repeated_prompt_finds_its_replica_in_a_sampled_fleet() -> None:
    router = router_of(1000, "gorgo-ms", 8)
    first = dispatched(submitted(router, a_request("first", blocks=PROMPT), now=0.0))
    router.on_first_token(first.attempt_id, now=0.1)
    for number in range(20):
        again = dispatched(submitted(router, a_request(f"again-{number}", blocks=PROMPT), now=0.2))
        assert again.decision.best_cached_tokens == 256, "one of its owners is compared"


# --- What the ends of attempts say about the prefix index.


def prompt(name: int, count: int = 40) -> bytes:
    """So many blocks that no other prompt shares."""
    return b"".join((1000 * name + number).to_bytes(8, "little") for number in range(count))


def send(router: Router, name: int, *, now: float, count: int = 40) -> str:
    request = a_request(f"r{name}-{now}", prompt_tokens=count * 64, blocks=prompt(name, count))
    return dispatched(submitted(router, request, now=now)).attempt_id


def held_of(router: Router, *names: int) -> list[float]:
    return [float(router.index.match(prompt(name), 1)[0]) for name in names]


@pytest.mark.parametrize(("policy", "left"), [("gorgo-ms", [40, 0, 40]), ("gorgo", [0, 40, 40])])
def test_a_stream_that_ends_after_others_is_the_last_to_go_where_the_index_is_bounded(
    policy: str, left: list[float]
) -> None:
    """The engine held its blocks to the end, so it used them last; the published index knows no uses by the engine."""
    router = make_router(
        policy=policy,
        replicas=[ReplicaSpec("a", "here", kv_capacity_tokens=100 * 64)],
        limits=RouterLimits(max_index_blocks=100),
    )
    long = send(router, 1, now=0.0)
    router.on_first_token(long, now=1.0)
    short = send(router, 2, now=2.0)
    router.on_first_token(short, now=3.0)
    router.on_finish(short, COMPLETED, now=4.0)
    router.on_finish(long, COMPLETED, now=5.0)
    router.on_first_token(send(router, 3, now=6.0), now=7.0)
    assert held_of(router, 1, 2, 3) == left


def test_an_answer_without_a_first_token_of_its_own_confirms_its_prompt() -> None:
    router = make_router("a", policy="gorgo")
    router.on_finish(send(router, 1, now=0.0), COMPLETED, now=1.0)
    router.on_finish(send(router, 1, now=2.0), GONE, now=3.0)
    assert held_of(router, 1) == [40], "what was confirmed is not withdrawn by a later end"


def test_an_end_on_a_replica_that_has_left_says_nothing_of_the_one_in_its_slot() -> None:
    router = make_router("a", policy="gorgo-ms")
    attempts = [send(router, name, now=0.0) for name in (1, 2)]
    router.replicas.set_fleet([ReplicaSpec("b", "here")], now=1.0)
    router.on_first_token(attempts[0], now=2.0)
    for attempt in attempts:
        router.on_finish(attempt, COMPLETED, now=3.0)
    assert held_of(router, 1, 2) == [0, 0]


def test_a_replica_holds_as_many_blocks_as_its_pool_has_room_for() -> None:
    """6,400 tokens are a hundred blocks of 64, and fifty of 128; what the engine tells counts over regions.yaml."""
    router = make_router(policy="gorgo-ms", replicas=[ReplicaSpec("a", "here", kv_capacity_tokens=6400)])
    for name in range(1, 15):
        router.on_finish(send(router, name, now=0.0, count=10), COMPLETED, now=1.0)
    assert router.index.resident_blocks(0) == 100
    router.settings.set_limits(replace(router.settings.limits, block_tokens=128.0), now=5.0)
    assert router.index.resident_blocks(0) == 50
    router.replicas.on_engine_sample("a", EngineSample(kv_capacity_tokens=128 * 20 + 127), now=6.0)
    assert router.index.resident_blocks(0) == 20


CAPACITY = 100


def sized_router(*names: str, policy: str = "gorgo-ms") -> Router:
    specs = [ReplicaSpec(name, "here", kv_capacity_tokens=CAPACITY * 64) for name in names]
    return make_router(policy=policy, replicas=specs)


def fills(router: Router, *, now: float) -> list[float]:
    """As the next decision reads them."""
    probe = a_request(f"probe-{now}", prompt_tokens=10, blocks=b"")
    router.on_finish(dispatched(submitted(router, probe, now=now)).attempt_id, COMPLETED, now=now)
    return [float(fill) for fill in router._fleet.columns.cache_fill]


def test_a_cache_is_as_full_as_the_prompts_that_were_sent_there() -> None:
    router = sized_router("a")
    assert fills(router, now=0.0) == [0.0]
    attempt = send(router, 1, now=1.0, count=40)
    assert fills(router, now=1.1) == [0.4]
    router.on_first_token(attempt, now=2.0)
    router.on_finish(attempt, COMPLETED, now=3.0)
    send(router, 2, now=4.0, count=70)
    assert fills(router, now=4.1) == [0.7], "the first one was evicted as a whole"


def test_a_prompt_that_failed_a_flush_and_a_larger_pool_change_the_fill() -> None:
    router = sized_router("a")
    router.on_finish(send(router, 1, now=0.0), GONE, now=1.0)
    assert fills(router, now=1.1) == [0.0]
    router.on_first_token(send(router, 2, now=2.0), now=3.0)
    router.replicas.on_engine_sample("a", EngineSample(kv_capacity_tokens=2 * CAPACITY * 64), now=3.5)
    assert fills(router, now=3.6) == [0.2]
    router.caches.flush(now=4.0)
    assert fills(router, now=4.1) == [0.0]


def test_the_fill_of_a_pool_of_unknown_size_is_nothing() -> None:
    router = make_router("a")
    send(router, 1, now=0.0)
    assert fills(router, now=0.1) == [0.0]


def test_a_replica_in_the_slot_of_another_has_an_empty_cache() -> None:
    router = sized_router("a")
    send(router, 1, now=0.0)
    assert fills(router, now=0.1) == [0.4]
    router.replicas.set_fleet([ReplicaSpec("b", "here", kv_capacity_tokens=CAPACITY * 64)], now=1.0)
    assert fills(router, now=1.1) == [0.0]


def found_share(router: Router) -> float:
    return router._prefix_updater.found_share


def test_the_share_of_found_tokens_begins_at_a_half_and_follows_the_prompts() -> None:
    """Of 2,560 tokens nothing is found, and then all."""
    router = sized_router("a")
    assert found_share(router) == 0.5
    router.on_first_token(send(router, 1, now=0.0), now=0.5)
    first = 64_000 * 255 / 256 / (128_000 * 255 / 256 + 2560)
    assert found_share(router) == pytest.approx(first)
    send(router, 1, now=1.0)
    total = (128_000 * 255 / 256 + 2560) * 255 / 256 + 2560
    assert found_share(router) == pytest.approx((64_000 * (255 / 256) ** 2 + 2560) / total)


def test_a_prompt_counts_once_however_often_it_is_evaluated_and_sent() -> None:
    router = sized_router("a", "b")
    request = a_request("r", prompt_tokens=2560, blocks=prompt(1))
    first = dispatched(submitted(router, request, now=0.0))
    once = found_share(router)
    assert once < 0.5
    again, _ = router.on_finish(first.attempt_id, FAILED, now=0.5)
    assert isinstance(again, Dispatch), "it is sent to the other one"
    assert found_share(router) == once


@pytest.mark.parametrize(("found", "part"), [(1.0, 1.0), (0.25, 0.25), (0.0, 0.0)])
def test_a_copy_is_worth_the_part_of_a_prefix_that_engines_find(found: float, part: float) -> None:
    """Four sessions went on from 40 blocks on the first replica; the second lacks them."""
    parts = make_parts("a", "b", policy="gorgo-ms")
    for session in range(4):
        parts.index.confirm(prompt(1) + prompt(10 + session, 5), 0)
    for _ in range(LEAST_REPORTS):
        parts.found_shares.learn(0, None, confirmed_tokens=40 * 64.0, found_tokens=40 * 64.0 * found)
    request = a_request(prompt_tokens=50 * 64, blocks=prompt(1) + prompt(90, 10))
    terms = parts.dispatch(request, now=0.0).decision.terms
    np.testing.assert_allclose(terms["shared"], [0.0, -terms["prefill"][1] * part * 40 * 4 / 6 / 50], atol=1e-6)
