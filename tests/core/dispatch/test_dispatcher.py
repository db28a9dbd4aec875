"""What a dispatch writes down at the replica, and the replicas it names behind it."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from gorgo.core.dispatch.dispatcher import LARGE, can_sample, sample_candidates
from gorgo.core.fleet.eligibility import CandidateSet
from gorgo.core.fleet.fleet import Fleet
from gorgo.core.fleet.replica import Columns, ReplicaSpec
from gorgo.core.limits import OutlierLimits, RouterLimits
from gorgo.core.router import Router
from gorgo.policies.registry import POLICIES, make_policy
from tests.core.routers import FAILED, GONE, PROMPT, a_request, dispatched, fail_on, make_router, specs, submitted


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
