"""Which candidates of a large fleet a decision compares."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from gorgo.core.dispatch.candidate_sampler import LARGE, can_sample, sample_candidates
from gorgo.core.fleet.columns import Columns
from gorgo.core.fleet.eligibility import CandidateSet
from gorgo.core.fleet.fleet import Fleet
from gorgo.core.fleet.spec import ReplicaSpec
from gorgo.core.limits import OutlierLimits, RouterLimits
from gorgo.core.router import Router
from gorgo.policies.registry import POLICIES, make_policy
from tests.core.routers import PROMPT, a_request, dispatched, specs, submitted

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
