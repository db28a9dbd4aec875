"""Outlier detection, and what an operator reads of a replica: its state, why and since when."""

from __future__ import annotations

import numpy as np
import pytest

from gorgo.core.fleet.replica import HealthState, OutlierDetector, ReplicaSpec
from gorgo.core.fleet.snapshot import ReplicaSnapshot
from gorgo.core.limits import OutlierLimits, RouterLimits
from gorgo.core.messages.request import AttemptResult, EngineSample, Outcome, RouteRequest
from gorgo.core.router import Router
from gorgo.policies.registry import make_policy


@pytest.fixture
def health() -> OutlierDetector:
    return OutlierDetector(OutlierLimits(failures=3, base_s=5.0, max_s=60.0))


def fail(health: OutlierDetector, times: int, *, now: float) -> None:
    for _ in range(times):
        health.attempt_failed(dispatched_s=now, now=now)


def half_open(health: OutlierDetector) -> None:
    fail(health, 3, now=0.0)
    health.end_backoff(now=5.0)


def test_three_failures_in_a_row_eject_and_two_do_not(health: OutlierDetector) -> None:
    fail(health, 2, now=0.0)
    assert health.can_accept
    fail(health, 1, now=0.0)
    assert health.state is HealthState.EJECTED
    assert health.backoff_until_s == 5.0
    assert not health.can_accept


def test_a_success_in_between_starts_the_count_again(health: OutlierDetector) -> None:
    fail(health, 2, now=0.0)
    health.attempt_succeeded(dispatched_s=0.0, now=1.0)
    fail(health, 2, now=2.0)
    assert health.can_accept


def test_failed_probes_eject_too(health: OutlierDetector) -> None:
    assert [health.probe_failed(now=float(now)) for now in range(3)] == [False, False, True]
    assert health.state is HealthState.EJECTED


def test_a_good_probe_does_not_wipe_out_failed_attempts(health: OutlierDetector) -> None:
    """The server of a broken engine still answers a ping."""
    fail(health, 2, now=0.0)
    health.probe_succeeded(now=1.0)
    fail(health, 1, now=2.0)
    assert health.state is HealthState.EJECTED


def test_the_back_off_doubles_up_to_its_maximum(health: OutlierDetector) -> None:
    fail(health, 3, now=0.0)
    waits = []
    for _ in range(6):
        assert health.backoff_until_s is not None
        now = health.backoff_until_s
        waits.append(now - health.changed_s)
        assert health.end_backoff(now=now)
        fail(health, 1, now=now)
    assert waits == [5, 10, 20, 40, 60, 60]


def test_after_the_back_off_one_trial_at_a_time(health: OutlierDetector) -> None:
    fail(health, 3, now=0.0)
    assert not health.end_backoff(now=4.9)
    assert health.end_backoff(now=5.0)
    assert health.attempt_started("r/1")
    assert not health.attempt_started("r/2")
    assert not health.can_accept
    assert not health.attempt_ended("other/1")
    assert health.attempt_ended("r/1")
    assert health.attempt_started("r/3")


def test_a_good_trial_readmits_and_forgets(health: OutlierDetector) -> None:
    half_open(health)
    assert health.attempt_succeeded(dispatched_s=5.0, now=6.0)
    assert health.state is HealthState.HEALTHY
    fail(health, 2, now=7.0)
    assert health.can_accept


def test_a_good_probe_readmits_on_probation(health: OutlierDetector) -> None:
    half_open(health)
    assert health.probe_succeeded(now=6.0)
    assert health.can_accept
    fail(health, 1, now=7.0)
    assert health.backoff_until_s == 17.0  # one failure was enough, and the back-off has doubled


def test_a_probe_during_the_back_off_changes_nothing(health: OutlierDetector) -> None:
    fail(health, 3, now=0.0)
    assert not health.probe_succeeded(now=1.0)
    assert not health.probe_failed(now=1.0)
    assert health.backoff_until_s == 5.0


def test_streams_cut_together_eject_once(health: OutlierDetector) -> None:
    fail(health, 100, now=0.0)
    health.end_backoff(now=5.0)
    for _ in range(100):
        health.attempt_failed(dispatched_s=-1.0, now=5.0)
    assert health.state is HealthState.HALF_OPEN
    assert health.ejections == 1


def test_a_success_from_before_the_ejection_does_not_readmit(health: OutlierDetector) -> None:
    fail(health, 3, now=10.0)
    assert not health.attempt_succeeded(dispatched_s=9.0, now=11.0)
    assert health.state is HealthState.EJECTED


def test_a_trial_is_for_half_open_replicas(health: OutlierDetector) -> None:
    assert not health.attempt_started("r/1")
    assert health.can_accept
    fail(health, 3, now=0.0)
    assert not health.attempt_started("r/2")
    health.end_backoff(now=5.0)
    assert health.attempt_started("r/3")


def test_two_failed_pings_are_none_after_a_good_one(health: OutlierDetector) -> None:
    for now in (0.0, 1.0):
        health.probe_failed(now=now)
    assert not health.probe_succeeded(now=2.0)
    assert [health.probe_failed(now=now) for now in (3.0, 4.0, 5.0)] == [False, False, True]


def test_a_good_attempt_wipes_out_failed_pings_and_says_nothing_new_of_a_healthy_replica(
    health: OutlierDetector,
) -> None:
    for now in (0.0, 1.0):
        health.probe_failed(now=now)
    assert not health.attempt_succeeded(dispatched_s=0.0, now=2.0)
    assert not health.probe_failed(now=3.0)


@pytest.mark.parametrize(("by", "unreachable"), [("attempts", False), ("probes", True), ("region", True)])
def test_a_replica_without_pings_is_unreachable_and_one_with_failed_attempts_may_not_be(
    health: OutlierDetector, by: str, unreachable: bool
) -> None:
    assert not health.probe_down
    if by == "attempts":
        fail(health, 3, now=0.0)
    elif by == "probes":
        for _ in range(3):
            health.probe_failed(now=0.0)
    else:
        assert health.region_unreachable(now=0.0)
        assert not health.region_unreachable(now=1.0), "it is already"
    assert (health.ejected_by, health.probe_down) == (by, unreachable)
    # One that cannot be reached may be tried as soon as it answers; the other one when its back-off is over.
    assert health.probe_succeeded(now=1.0) is unreachable
    assert health.end_backoff(now=5.0) is not unreachable
    assert health.probe_down is unreachable
    assert health.probe_succeeded(now=6.0)
    assert not health.probe_down


def test_a_back_off_is_cut_short_for_failed_attempts_alone_and_never_made_longer() -> None:
    for fault, wakes_s in (("attempts", 2.0), ("probes", 5.0)):
        health = OutlierDetector(OutlierLimits(failures=1, base_s=5.0))
        (fail(health, 1, now=0.0) if fault == "attempts" else health.probe_failed(now=0.0))
        health.shorten_backoff()
        assert health.backoff_until_s == wakes_s
    quick = OutlierDetector(OutlierLimits(failures=1, base_s=0.5))
    quick.shorten_backoff()
    assert quick.backoff_until_s is None
    fail(quick, 1, now=0.0)
    quick.shorten_backoff()
    assert quick.backoff_until_s == 0.5


def test_a_replica_that_can_be_reached_again_may_be_tried_whatever_its_back_off(health: OutlierDetector) -> None:
    assert not health.region_reachable(now=0.0)
    health.region_unreachable(now=0.0)
    assert health.region_reachable(now=1.0)
    assert (health.state, health.backoff_until_s) == (HealthState.HALF_OPEN, None)
    assert not health.region_reachable(now=2.0)


def test_an_attempt_from_before_the_last_readmission_says_nothing(health: OutlierDetector) -> None:
    half_open(health)
    assert health.probe_succeeded(now=6.0)
    assert not health.attempt_failed(dispatched_s=5.9, now=7.0)
    assert not health.attempt_succeeded(dispatched_s=5.9, now=7.0)
    assert health.ejections == 1
    assert health.attempt_failed(dispatched_s=6.0, now=8.0), "one is enough while it is on probation"


def test_its_illness_began_with_the_first_ejection_and_ends_with_its_readmission(health: OutlierDetector) -> None:
    fail(health, 3, now=1.0)
    health.end_backoff(now=6.0)
    fail(health, 1, now=7.0)
    assert (health.ejected_since_s, health.changed_s) == (1.0, 7.0)
    health.end_backoff(now=17.0)
    health.probe_succeeded(now=18.0)
    assert (health.ejected_since_s, health.changed_s, health.backoff_until_s) == (None, 18.0, None)


def test_counts_begin_anew_with_each_ejection_and_readmission(health: OutlierDetector) -> None:
    fail(health, 2, now=0.0)
    for _ in range(3):
        health.probe_failed(now=0.0)
    assert (health.attempt_failures, health.probe_failures) == (0, 0)
    health.end_backoff(now=5.0)
    health.probe_failed(now=5.0)
    assert health.backoff_until_s == 15.0, "a failed ping on probation ejects for twice as long"


def test_the_longest_back_off_is_kept_after_hundreds_of_ejections() -> None:
    health = OutlierDetector(OutlierLimits(failures=1, base_s=5.0, max_s=60.0))
    now = 0.0
    for _ in range(1100):
        fail(health, 1, now=now)
        assert health.backoff_until_s is not None
        now = health.backoff_until_s
        health.end_backoff(now=now)
    assert now - health.changed_s == 60.0


def break_off(health: OutlierDetector, *, dispatched_s: float, now: float) -> bool:
    """An answer that broke off after its first token."""
    health.attempt_succeeded(dispatched_s=dispatched_s, now=now, whole=False)
    return health.answer_broken(dispatched_s=dispatched_s, now=now)


def test_answers_that_break_off_eject_though_each_has_a_first_token(health: OutlierDetector) -> None:
    assert [break_off(health, dispatched_s=now, now=now + 0.01) for now in (0.0, 0.02, 0.04)] == [False, False, True]
    assert (health.ejected_by, health.breaks_answers, health.probe_down) == ("answers", True, False)


def test_whole_answers_in_between_start_the_count_of_broken_ones_again(health: OutlierDetector) -> None:
    for now in range(0, 60, 3):
        assert not break_off(health, dispatched_s=now, now=now)
        for later in (1, 2):
            health.attempt_succeeded(dispatched_s=now + later, now=now + later)
            assert not health.breaks_answers


@pytest.mark.parametrize("streamed", [True, False])
def test_half_of_the_answers_of_a_kind_eject_if_they_break_off(health: OutlierDetector, streamed: bool) -> None:
    ejected = []
    for now in range(0, 8, 2):
        ejected.append(health.answer_broken(dispatched_s=now, now=now, streamed=streamed))
        if not ejected[-1]:
            health.attempt_succeeded(dispatched_s=now + 1, now=now + 1, streamed=streamed)
    assert ejected == [False, False, False, True]
    assert (health.ejected_by, health.ejected_for_streams) == ("answers", streamed)


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("breaks", [True, False])
def test_answers_of_the_other_kind_say_nothing_of_one_that_fails(
    health: OutlierDetector, streamed: bool, breaks: bool
) -> None:
    fails = health.answer_broken if breaks else health.attempt_failed
    for now in range(3):
        assert fails(dispatched_s=now, now=now, streamed=streamed) is (now == 2)
        health.attempt_succeeded(dispatched_s=now, now=now, streamed=not streamed)
    health.end_backoff(now=7.0)
    assert not health.attempt_succeeded(dispatched_s=7.0, now=7.0, streamed=not streamed), "nor does it readmit"
    assert health.state is HealthState.HALF_OPEN
    health.probe_succeeded(now=7.5)
    health.attempt_succeeded(dispatched_s=8.0, now=8.0, streamed=not streamed)
    assert fails(dispatched_s=8.0, now=8.0, streamed=streamed), "one more is enough until one of its kind is good"
    health.end_backoff(now=18.0)
    assert health.attempt_succeeded(dispatched_s=18.0, now=18.0, streamed=streamed)
    assert (health.state, health.ejections) == (HealthState.HEALTHY, 0)


def test_open_answers_that_break_off_together_are_one(health: OutlierDetector) -> None:
    for number in range(100):
        assert not break_off(health, dispatched_s=number / 1000, now=1.0 + number / 2000)
    assert health.broken_answers == 1
    assert not break_off(health, dispatched_s=0.5, now=1.15)
    assert break_off(health, dispatched_s=0.5, now=1.3)


def test_a_first_token_readmits_no_replica_that_breaks_answers_off_and_a_whole_answer_does(
    health: OutlierDetector,
) -> None:
    for now in (0.0, 1.0, 2.0):
        break_off(health, dispatched_s=now, now=now)
    health.end_backoff(now=7.0)
    assert not health.attempt_succeeded(dispatched_s=7.0, now=7.0, whole=False)
    assert health.state is HealthState.HALF_OPEN
    assert break_off(health, dispatched_s=7.0, now=8.0)
    assert health.backoff_until_s == 18.0
    health.end_backoff(now=18.0)
    assert health.attempt_succeeded(dispatched_s=18.0, now=19.0)
    assert (health.state, health.breaks_answers) == (HealthState.HEALTHY, False)


def test_a_success_while_ejected_readmits() -> None:
    """In a panic requests go to ejected replicas as well; one that answers is well again."""
    health = OutlierDetector(OutlierLimits(failures=1))
    fail(health, 1, now=0.0)
    assert health.attempt_succeeded(dispatched_s=1.0, now=2.0)
    assert health.can_accept
    assert health.backoff_until_s is None


# --- What an operator reads of a replica: its state, why and since when, and the newest decisions and samples.


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
