"""What an operator reads of a replica: its state, why and since when, and the newest decisions and samples."""

from __future__ import annotations

import numpy as np
import pytest

from gorgo.core.fleet.snapshot import ReplicaSnapshot
from gorgo.core.fleet.spec import ReplicaSpec
from gorgo.core.limits import RouterLimits
from gorgo.core.messages.request import AttemptResult, Outcome, RouteRequest
from gorgo.core.router import Router
from gorgo.policies.registry import make_policy

LIMITS = RouterLimits(slow_start_s=10.0, region_window_s=5.0)


@pytest.fixture
def router() -> Router:
    replicas = [ReplicaSpec("a", "near"), ReplicaSpec("b", "far"), ReplicaSpec("c", "far")]
    made = Router(replicas, make_policy("round-robin"), rng=np.random.default_rng(0), boot_id="b", limits=LIMITS)
    for name in "abc":
        made.on_probe(name, 0.01, now=0.0)
    return made


def view(router: Router, name: str, now: float) -> ReplicaSnapshot:
    return next(row for row in router.fleet_view(now=now) if row.name == name)


def ask(router: Router, request_id: str, now: float) -> None:
    request = RouteRequest(request_id, now, prompt_tokens=100, blocks=b"", block_tokens=64.0, prefix_hash=0)
    router.submit(request, now=now)
    router.on_finish(f"{request_id}/1", Outcome(AttemptResult.COMPLETED, status=200), now=now)


def test_healthy_replica_has_been_so_since_it_joined(router: Router) -> None:
    row = view(router, "a", 7.0)
    assert (row.state, row.ejected_by, row.in_state_for_s, row.slow_start_for_s) == ("healthy", None, None, None)


def test_ejected_replica_says_what_ejected_it_and_since_when(router: Router) -> None:
    for second in (1.0, 2.0, 3.0):
        router.on_probe("a", None, now=second)
    row = view(router, "a", 4.0)
    assert (row.state, row.ejected_by, row.in_state_for_s) == ("ejected", "probes", 1.0)


def test_replica_whose_trial_fails_is_away_since_it_was_ejected_first(router: Router) -> None:
    for second in (1.0, 2.0, 3.0):
        router.on_probe("a", None, now=second)
    router.handle_timer(now=8.0)
    assert view(router, "a", 8.5).state == "half_open"
    router.on_probe("a", None, now=9.0)
    assert (view(router, "a", 10.0).state, view(router, "a", 10.0).in_state_for_s) == ("ejected", 7.0)
    router.handle_timer(now=19.0)
    router.on_probe("a", 0.01, now=20.0)
    assert (view(router, "a", 21.0).state, view(router, "a", 21.0).in_state_for_s) == ("healthy", 1.0)


def test_region_that_is_cut_off_says_so_at_each_of_its_replicas(router: Router) -> None:
    for name in "bc":
        router.on_probe(name, None, now=1.0)
    assert [view(router, name, 1.0).ejected_by for name in "bc"] == ["region", "region"]
    router.on_probe("b", 0.2, now=2.0)
    assert view(router, "c", 2.0).ejected_by == "region"  # on trial, and why is still of interest
    assert view(router, "b", 2.0).ejected_by in ("region", None)


def test_draining_replica_says_since_when_however_often_it_is_told(router: Router) -> None:
    router.drain("a", now=1.0)
    router.drain("a", now=5.0)
    assert (view(router, "a", 6.0).state, view(router, "a", 6.0).in_state_for_s) == ("draining", 5.0)
    router.drain("a", False, now=7.0)
    assert (view(router, "a", 8.0).state, view(router, "a", 8.0).in_state_for_s) == ("healthy", None)


def test_replica_on_its_ramp_says_how_long_yet_and_how_many(router: Router) -> None:
    joined = [ReplicaSpec("a", "near"), ReplicaSpec("new", "near")]
    router.set_fleet(joined, now=100.0)
    row = view(router, "new", 104.0)
    assert row.slow_start_for_s == pytest.approx(6.0)
    assert row.slow_start_in_flight == int(2 * 128**0.4)
    assert view(router, "new", 110.0).slow_start_for_s is None


def test_prefill_rate_is_the_prior_s_until_something_is_learned(router: Router) -> None:
    assert view(router, "a", 0.0).prefill_tokens_per_s == pytest.approx(11_500)


def test_newest_decisions_and_samples_come_newest_first_and_no_more_than_asked_for(router: Router) -> None:
    for number in range(5):
        ask(router, f"r{number}", now=float(number))
    assert [decision.request_id for decision in router.newest_decisions(3)] == ["r4", "r3", "r2"]
    assert [sample.request_id for sample in router.samples.newest(2)] == ["r4", "r3"]
    assert len(router.newest_decisions(99)) == len(router.samples.newest(99)) == 5
