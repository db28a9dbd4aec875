"""What an operator reads of a replica: its state, why and since when, and the newest decisions and samples."""

from __future__ import annotations

import numpy as np
import pytest

from gorgo.core.fleet.replica import ReplicaSpec
from gorgo.core.fleet.snapshot import ReplicaSnapshot
from gorgo.core.limits import RouterLimits
from gorgo.core.messages.request import AttemptResult, EngineSample, Outcome, RouteRequest
from gorgo.core.router import Router
from gorgo.policies.registry import make_policy

LIMITS = RouterLimits(slow_start_s=10.0, region_window_s=5.0)


@pytest.fixture
def router() -> Router:
    replicas = [ReplicaSpec("a", "near"), ReplicaSpec("b", "far"), ReplicaSpec("c", "far")]
    made = Router(replicas, make_policy("round-robin"), rng=np.random.default_rng(0), boot_id="b", limits=LIMITS)
    for name in "abc":
        made.replicas.on_probe(name, 0.01, now=0.0)
    return made


def view(router: Router, name: str, now: float) -> ReplicaSnapshot:
    return next(row for row in router.view.snapshots(now=now) if row.name == name)


def ask(router: Router, request_id: str, now: float) -> None:
    request = RouteRequest(request_id, now, prompt_tokens=100, blocks=b"", block_tokens=64.0, prefix_hash=0)
    router.submit(request, now=now)
    router.on_finish(f"{request_id}/1", Outcome(AttemptResult.COMPLETED, status=200), now=now)


def test_healthy_replica_has_been_so_since_it_joined(router: Router) -> None:
    row = view(router, "a", 7.0)
    assert (row.state, row.ejected_by, row.in_state_for_s, row.slow_start_for_s) == ("healthy", None, None, None)


def test_ejected_replica_says_what_ejected_it_and_since_when(router: Router) -> None:
    for second in (1.0, 2.0, 3.0):
        router.replicas.on_probe("a", None, now=second)
    row = view(router, "a", 4.0)
    assert (row.state, row.ejected_by, row.in_state_for_s) == ("ejected", "probes", 1.0)


def test_replica_whose_trial_fails_is_away_since_it_was_ejected_first(router: Router) -> None:
    for second in (1.0, 2.0, 3.0):
        router.replicas.on_probe("a", None, now=second)
    router.handle_timer(now=8.0)
    assert view(router, "a", 8.5).state == "half_open"
    router.replicas.on_probe("a", None, now=9.0)
    assert (view(router, "a", 10.0).state, view(router, "a", 10.0).in_state_for_s) == ("ejected", 7.0)
    router.handle_timer(now=19.0)
    router.replicas.on_probe("a", 0.01, now=20.0)
    assert (view(router, "a", 21.0).state, view(router, "a", 21.0).in_state_for_s) == ("healthy", 1.0)


def test_region_that_is_cut_off_says_so_at_each_of_its_replicas(router: Router) -> None:
    for name in "bc":
        router.replicas.on_probe(name, None, now=1.0)
    assert [view(router, name, 1.0).ejected_by for name in "bc"] == ["region", "region"]
    router.replicas.on_probe("b", 0.2, now=2.0)
    assert view(router, "c", 2.0).ejected_by == "region"  # on trial, and why is still of interest
    assert view(router, "b", 2.0).ejected_by in ("region", None)


def test_draining_replica_says_since_when_however_often_it_is_told(router: Router) -> None:
    router.replicas.drain("a", now=1.0)
    router.replicas.drain("a", now=5.0)
    assert (view(router, "a", 6.0).state, view(router, "a", 6.0).in_state_for_s) == ("draining", 5.0)
    router.replicas.drain("a", False, now=7.0)
    assert (view(router, "a", 8.0).state, view(router, "a", 8.0).in_state_for_s) == ("healthy", None)


def test_replica_on_its_ramp_says_how_long_yet_and_how_many(router: Router) -> None:
    joined = [ReplicaSpec("a", "near"), ReplicaSpec("new", "near")]
    router.replicas.set_fleet(joined, now=100.0)
    row = view(router, "new", 104.0)
    assert row.slow_start_for_s == pytest.approx(6.0)
    assert row.slow_start_in_flight == int(2 * 128**0.4)
    assert view(router, "new", 110.0).slow_start_for_s is None


def test_prefill_rate_is_the_prior_s_until_something_is_learned(router: Router) -> None:
    assert view(router, "a", 0.0).prefill_tokens_per_s == pytest.approx(11_500)


def test_every_figure_of_a_row_is_as_worked_out_by_hand() -> None:
    """1,000 tokens a second, 100 ms away; a request of 1,000 tokens sent at 10, 640 of which were sent before."""
    spec = ReplicaSpec(
        "a", "near", ("m", "n"), prefill_base_s=0.0, prefill_tokens_per_s=1000.0, prefill_kappa_s=0.0, tls=True
    )
    router = Router([spec, ReplicaSpec("b", "far")], make_policy("gorgo-ms"), rng=np.random.default_rng(0), boot_id="b")
    router.replicas.on_probe("a", 0.1, now=1.0)
    blocks = b"".join(number.to_bytes(8, "little") for number in range(10))
    for request_id, tokens, now in (("r1", 640, 2.0), ("r2", 1000, 10.0)):
        request = RouteRequest(request_id, now, tokens, blocks, 64.0, 0, model="m", pinned_replica="a")
        router.submit(request, now=now)
    router.replicas.on_engine_sample(
        "a",
        EngineSample(5.0, 6.0, 7.0, 64_000.0, 9.0, prefill_tokens_total=1e4, prefill_busy_s_total=30.0),
        now=11.0,
    )
    router.replicas.on_probe("a", None, now=12.0)
    row = view(router, "a", 12.5).as_dict()
    busy_s, told = row.pop("backlog_s"), row.pop("prefill_slowdown_reported")
    assert told == pytest.approx(3.0)
    # 640 ms from 2.05 on, then 360 ms from 10.05 on: nothing is left by the clock.
    assert busy_s == 0.0
    assert row == {
        "name": "a",
        "region": "near",
        "models": ("m", "n"),
        "state": "healthy",
        "eligible": True,
        "panic": False,
        "ejected_for_s": None,
        "ejected_by": None,
        "ejected_why": None,
        "in_state_for_s": None,
        "slow_start_for_s": None,
        "slow_start_in_flight": None,
        "failures_in_a_row": 1,
        "answers": False,
        "refusal": None,
        "rtt_ms": 100.0,
        "probe_age_s": 11.5,
        "in_flight_requests": 2,
        "in_flight_tokens": 1640,
        "queued_prefill_tokens": 1640,
        "prefill_slowdown": 1.0,
        "parallel_prefills": 1,
        "tpot_ms": None,
        "itl_ms_p95": None,
        "decode_slowdown": None,
        "accelerator": None,
        "prefill_tokens_per_s": 1000.0,
        "running_requests": 5.0,
        "queued_requests": 6.0,
        "used_tokens": 7.0,
        "scrape_age_s": 1.5,
        "kv_capacity_tokens": 64_000.0,
        "max_running_requests": 9.0,
        "index_blocks": 10,
        "index_tokens": 640,
        "found_share": None,
        "overdue_requests": 1,
        "overdue_for_s": pytest.approx(9.76),
        "overdue": ("r1",),
        "attempts": 2,
        "failures": 0,
        "restarts": 0,
    }
    assert view(router, "a", 10.2).backlog_s == pytest.approx(10.05 + 0.36 - 10.2 - 0.05)
    unknown = view(router, "b", 12.5)
    assert (unknown.rtt_ms, unknown.probe_age_s, unknown.scrape_age_s, unknown.kv_capacity_tokens) == (None,) * 4


def test_a_rate_is_the_prior_s_by_what_was_learned() -> None:
    """A second of the prior took two: a factor of (2 + 5) / (1 + 5)."""
    spec = ReplicaSpec("a", "near", prefill_base_s=0.0, prefill_tokens_per_s=1000.0, prefill_kappa_s=0.0)
    router = Router([spec], make_policy("gorgo-ms"), rng=np.random.default_rng(0), boot_id="b")
    router.replicas.on_probe("a", 0.0, now=0.0)
    router.submit(RouteRequest("r", 0.0, 1000, b"", 64.0, 0), now=0.0)
    router.on_first_token("r/1", now=2.005)
    row = view(router, "a", 3.0)
    assert row.prefill_slowdown == pytest.approx(7 / 6)
    assert row.prefill_tokens_per_s == pytest.approx(1000 * 6 / 7)


def test_a_back_off_that_is_over_has_no_time_left(router: Router) -> None:
    for second in (1.0, 2.0, 3.0):
        router.replicas.on_probe("a", None, now=second)
    assert [view(router, "a", now).ejected_for_s for now in (4.0, 8.0, 9.0)] == [4.0, 0.0, 0.0]
    assert view(router, "a", 4.0).failures_in_a_row == 0


def test_eligibility_in_a_row_is_for_a_model_that_the_replica_serves() -> None:
    replicas = [ReplicaSpec("a", "near", ("m",)), ReplicaSpec("b", "far", ("n",))]
    made = Router(replicas, make_policy("round-robin"), rng=np.random.default_rng(0), boot_id="b")
    made.replicas.drain("b", now=0.0)
    assert [row.eligible for row in made.view.snapshots(now=0.0)] == [True, False]


def test_newest_decisions_and_samples_come_newest_first_and_no_more_than_asked_for(router: Router) -> None:
    for number in range(5):
        ask(router, f"r{number}", now=float(number))
    assert [decision.request_id for decision in router.view.newest_decisions(3)] == ["r4", "r3", "r2"]
    assert [sample.request_id for sample in router.samples.newest(2)] == ["r4", "r3"]
    assert len(router.view.newest_decisions(99)) == len(router.samples.newest(99)) == 5
