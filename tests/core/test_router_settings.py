"""What is set at the Router from outside, and what it shows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gorgo.core.fleet.replica import ReplicaSpec
from gorgo.core.limits import OutlierLimits, OverloadLimits, RouterLimits
from gorgo.core.messages.actions import Dispatch, Hold, ReplicaRestarted
from gorgo.core.messages.request import AttemptResult, EngineSample, Outcome
from gorgo.core.policy.weights import Weights
from gorgo.core.router import Router
from gorgo.policies.registry import make_policy
from tests.core.routers import (
    BROKEN,
    BUSY,
    COMPLETED,
    FAILED,
    GONE,
    PROMPT,
    REFUSED,
    a_request,
    believed,
    dispatched,
    fail_on,
    finished,
    load_of,
    make_router,
    rejected,
    set_policy,
    set_weights,
    specs,
    submitted,
    timed,
)

# -- fleet changes under open attempts


def test_a_late_finish_does_not_touch_the_replica_that_took_the_slot() -> None:
    router = make_router("a", "b")
    old = dispatched(submitted(router, a_request("old", blocks=PROMPT), now=0.0))
    assert old.replica == "a"
    router.replicas.set_fleet(specs("n", "b"), now=1.0)
    router.replicas.on_probe("n", 0.001, now=1.0)
    new = dispatched(submitted(router, a_request("new", prompt_tokens=100), now=1.0))
    assert new.replica == "n"
    router.on_first_token(old.attempt_id, now=2.0)
    router.on_finish(old.attempt_id, COMPLETED, now=2.0)
    assert load_of(router, "n") == (1, 100, 100)
    assert believed(router)[:2] == [0, 0]
    assert [sample.replica for sample in router.samples] == ["a"]


def test_a_replica_that_comes_back_starts_without_load_or_belief() -> None:
    router = make_router("a", "b")
    old = dispatched(submitted(router, a_request("old", blocks=PROMPT), now=0.0))
    router.replicas.set_fleet(specs("b"), now=1.0)
    router.replicas.set_fleet(specs("a", "b"), now=2.0)
    router.on_finish(old.attempt_id, GONE, now=3.0)
    assert load_of(router, "a") == (0, 0, 0)
    assert believed(router)[:2] == [0, 0]


def test_a_failure_on_a_replica_that_has_left_is_retried_on_the_fleet_as_it_is() -> None:
    router = make_router("a")
    old = dispatched(submitted(router, a_request(), now=0.0))
    router.replicas.set_fleet(specs("n"), now=1.0)
    assert dispatched(finished(router, old.attempt_id, FAILED, now=2.0)).replica == "n"


def test_who_stays_keeps_its_belief() -> None:
    router = make_router("a", "b", "c")
    router.submit(a_request(blocks=PROMPT), now=0.0)
    router.replicas.set_fleet(specs("a", "d", "e"), now=1.0)
    assert believed(router) == [4, 0, 0]


def test_other_limits_hold_from_the_next_event_on() -> None:
    router = make_router("a", "b")
    first = dispatched(submitted(router, a_request("first", blocks=PROMPT), now=0.0))
    router.replicas.on_probe("a", 0.1, now=0.0)
    limits = replace(
        router.settings.limits,
        max_attempts=1,
        max_in_flight=1,
        stale_after_s=5.0,
        rtt_ewma_alpha=1.0,
        max_index_blocks=2,
    )
    router.settings.set_limits(limits, now=1.0)
    assert rejected(submitted(router, a_request("second"), now=1.0)).status == 429
    rejected(finished(router, first.attempt_id, FAILED, now=1.0))
    router.replicas.on_probe("a", 0.3, now=2.0)
    assert router.view.snapshots(now=2.0)[0].rtt_ms == pytest.approx(300)
    assert router.next_timer() == 5.0  # of the other replica, probed at 0
    dispatched(submitted(router, a_request("third", blocks=PROMPT), now=2.0))
    assert router.index.stored_blocks <= 2


# -- weights and policies


def test_weights_get_a_new_version_and_decide_from_then_on() -> None:
    router = make_router("a", policy="gorgo")
    assert router.settings.weights.version == 1
    weights = set_weights(router, {"w_rtt": 1.0})
    assert (weights.version, dict(weights)) == (2, {"w_rtt": 1.0, "w_queue": 0.1})
    assert dispatched(submitted(router, a_request(), now=0.0)).decision.weights_version == 2


def test_a_router_starts_from_the_weights_that_it_is_given_even_outside_their_box() -> None:
    weights = Weights.of(make_policy("gorgo").weight_specs, {"w_rtt": 9.0}, version=7, allow_out_of_range=True)
    router = Router(specs("a"), make_policy("gorgo"), rng=np.random.default_rng(0), boot_id="boot", weights=weights)
    assert (router.settings.weights.version, dict(router.settings.weights)) == (7, {"w_rtt": 9.0, "w_queue": 0.1})


@pytest.mark.parametrize("policy", ["gorgo", "gorgo-ms"])
def test_weights_set_live_are_in_the_terms_of_the_next_decision(policy: str) -> None:
    """10 ms of round trip: 0.5 tokens or 1 ms each at first, twice as much afterwards."""
    router = make_router("a", policy=policy)
    before = dispatched(submitted(router, a_request("r1"), now=0.0)).decision
    name = {"gorgo": "w_rtt", "gorgo-ms": "m_rtt"}[policy]
    set_weights(router, {name: 2 * router.settings.weights[name]})
    after = dispatched(submitted(router, a_request("r2"), now=0.0)).decision
    assert before.terms["rtt"].tolist() == pytest.approx([{"gorgo": 5.0, "gorgo-ms": 10.0}[policy]])
    assert after.terms["rtt"].tolist() == pytest.approx([2 * before.terms["rtt"][0]])
    assert after.weights == dict(router.settings.weights)


def test_a_policy_brings_the_index_that_it_reads() -> None:
    router = make_router(replicas=[ReplicaSpec("a", "here", kv_capacity_tokens=128)], policy="gorgo")
    for blocks in (PROMPT, PROMPT[::-1]):  # each longer than the KV capacity of two blocks
        finished(
            router, dispatched(submitted(router, a_request(blocks=blocks), now=0.0)).attempt_id, COMPLETED, now=1.0
        )
    assert router.index.resident_blocks(0) == 4
    set_policy(router, "gorgo-ms", now=2.0)
    assert (router.index.bounded, router.index.resident_blocks(0)) == (True, 2)


# -- what lets those go who wait


@pytest.mark.parametrize("change", ["policy", "fleet", "drain", "limits"])
def test_a_change_that_may_have_opened_a_replica_offers_it_to_waiting_requests(change: str) -> None:
    """The far one is full and the near one drained; then there is another policy, replica, mark or limit."""
    limits = RouterLimits(overload=OverloadLimits(queue_enabled=True, max_concurrency_per_replica=1))
    router = make_router(policy="gorgo-ms", replicas=[timed("near"), timed("far")], limits=limits)
    router.replicas.drain("near", now=0.0)
    assert dispatched(submitted(router, a_request("r1"), now=0.0)).replica == "far"
    assert isinstance(submitted(router, a_request("r2"), now=0.0)[-1], Hold)
    assert router.handle_timer(now=0.1) == []
    if change == "policy":
        set_policy(router, "least-request", now=0.2)
    elif change == "fleet":
        router.replicas.set_fleet([timed("near"), timed("far"), timed("new")], now=0.2)
        router.replicas.on_probe("new", 0.01, now=0.2)
    elif change == "drain":
        router.replicas.drain("near", False, now=0.2)
    else:
        router.settings.set_limits(replace(limits, overload=OverloadLimits(queue_enabled=False)), now=0.2)
    if change == "fleet":
        assert router.queued == 0, "the probe has had it go"
        return
    assert router.next_timer() == 0.1, "at once"
    assert dispatched(router.handle_timer(now=0.2)).request_id == "r2"


# -- every limit by its effect


def test_a_slow_start_set_live_counts_for_replicas_that_join_from_then_on() -> None:
    router = make_router("a")
    router.replicas.set_fleet(specs("a", "early"), now=1.0)
    router.settings.set_limits(replace(router.settings.limits, slow_start_s=7.0), now=2.0)
    router.replicas.set_fleet(specs("a", "early", "late"), now=3.0)
    assert [view.slow_start_for_s for view in router.view.snapshots(now=3.0)] == [None, None, 7.0]


def test_the_fleet_of_the_start_is_on_no_ramp() -> None:
    router = make_router("a", "b", limits=RouterLimits(slow_start_s=7.0))
    assert [view.slow_start_for_s for view in router.view.snapshots(now=0.0)] == [None, None]
    router.replicas.set_fleet([], now=1.0)
    router.replicas.set_fleet(specs("c"), now=2.0)
    assert [view.slow_start_for_s for view in router.view.snapshots(now=2.0)] == [None], (
        "nor is one that nobody is beside"
    )


def test_a_window_of_regions_set_live_counts() -> None:
    router = make_router(replicas=[ReplicaSpec("a", "east"), ReplicaSpec("b", "east")])
    router.settings.set_limits(replace(router.settings.limits, region_window_s=1.0), now=0.0)
    router.replicas.on_probe("a", None, now=10.0)
    router.replicas.on_probe("b", None, now=12.0)
    assert router.view.unreachable_regions == frozenset()
    router.replicas.on_probe("a", None, now=13.0)
    assert router.view.unreachable_regions == {"east"}


def test_a_retry_budget_set_live_counts() -> None:
    router = make_router("a", "b")
    router.settings.set_limits(replace(router.settings.limits, retry_budget_ratio=0.0, retry_budget_minimum=1), now=0.0)
    first, second = (dispatched(submitted(router, a_request(f"r{n}"), now=0.0)) for n in range(2))
    assert isinstance(finished(router, first.attempt_id, FAILED, now=0.1)[0], Dispatch)
    assert rejected(finished(router, second.attempt_id, FAILED, now=0.2)).status == 502


def test_an_ejection_and_a_panic_set_live_count() -> None:
    router = make_router("a", "b")
    router.settings.set_limits(
        replace(router.settings.limits, outlier=OutlierLimits(failures=1, base_s=50.0), panic_threshold=0.0), now=0.0
    )
    fail_on(router, FAILED, 1)
    assert (router.view.health_states()["a"], router.next_timer()) == ("ejected", 51.0)
    router.replicas.on_probe("b", None, now=2.0)
    assert rejected(submitted(router, a_request("r"), now=2.0)).code == "no_replica"


# -- health, by what an attempt's end says


@pytest.mark.parametrize(
    ("outcome", "failures", "in_a_row"),
    [(FAILED, 1, 1), (BROKEN, 1, 0), (BUSY, 0, 0), (GONE, 0, 0), (REFUSED, 0, 0), (COMPLETED, 0, 0)],
    ids=lambda one: one.result.value if isinstance(one, Outcome) else None,
)
def test_failures_are_those_of_the_replica_and_in_a_row_those_before_content(
    outcome: Outcome, failures: int, in_a_row: int
) -> None:
    router = make_router("a")
    attempt = dispatched(submitted(router, a_request(), now=0.0)).attempt_id
    router.on_finish(attempt, outcome, now=1.0)
    (view,) = router.view.snapshots(now=1.0)
    assert (view.attempts, view.failures, view.failures_in_a_row) == (1, failures, in_a_row)


def test_an_answer_from_before_an_ejection_readmits_no_replica_and_begins_no_ramp() -> None:
    router = make_router("a", "b", limits=RouterLimits(slow_start_s=7.0))
    old = dispatched(submitted(router, a_request("old"), now=0.0))
    fail_on(router, FAILED, 3)
    router.handle_timer(now=6.0)
    router.on_finish(old.attempt_id, COMPLETED, now=6.5)
    view = router.view.snapshots(now=6.5)[0]
    assert (view.state, view.slow_start_for_s) == ("half_open", None)


def test_a_trial_that_succeeds_begins_a_ramp_at_its_first_token() -> None:
    router = make_router("a", "b", limits=RouterLimits(slow_start_s=7.0))
    fail_on(router, FAILED, 3)
    router.handle_timer(now=6.0)
    trial = dispatched(submitted(router, a_request("trial"), now=6.0))
    router.on_first_token(trial.attempt_id, now=6.5)
    assert router.view.snapshots(now=6.5)[0].slow_start_for_s == 7.0
    router.on_finish(trial.attempt_id, COMPLETED, now=8.0)
    assert router.view.snapshots(now=8.0)[0].slow_start_for_s == 5.5, "its end is no second readmission"


def test_weights_of_another_policy_are_a_fault_of_the_caller() -> None:
    router = make_router("a", policy="gorgo")
    before = router.settings.weights
    with pytest.raises(AssertionError):
        router.settings.set_weights(Weights({"w_rtt": 1.0}, 2), now=0.0)
    assert router.settings.weights is before


def test_a_new_policy_starts_from_its_own_weights_under_a_new_version() -> None:
    router = make_router("a", "b", policy="gorgo")
    set_weights(router, {"w_rtt": 1.0})
    weights = set_policy(router, "prefix-threshold", {"tau": 0.2})
    assert (weights.version, dict(weights)) == (3, {"tau": 0.2})
    assert dispatched(submitted(router, a_request(), now=0.0)).decision.policy == "prefix-threshold"


def test_a_sample_counts_for_the_weights_it_was_routed_under() -> None:
    router = make_router("a", policy="gorgo")
    attempt = dispatched(submitted(router, a_request(), now=0.0)).attempt_id
    set_weights(router, {"w_rtt": 1.0}, now=0.5)
    router.on_finish(attempt, COMPLETED, now=1.0)
    assert [sample.weights_version for sample in router.samples] == [1]


# -- samples and decisions


def test_a_sample_tells_the_whole_request() -> None:
    router = make_router("a", "b")
    router.replicas.on_probe("b", 0.09, now=9.0)
    first = dispatched(submitted(router, a_request(received_s=9.5, client="team-a", model="m"), now=10.0))
    second = dispatched(finished(router, first.attempt_id, FAILED, now=11.0))
    router.on_first_token(second.attempt_id, now=12.0)
    end = Outcome(AttemptResult.COMPLETED, 200, prompt_tokens=260, cached_tokens=64, output_tokens=20, itl_s_p95=0.02)
    router.on_finish(second.attempt_id, end, now=13.0)
    (row,) = router.samples.after(0)["samples"]
    rtt_ms, parts_ms = row.pop("rtt_ms"), row.pop("ttft_parts_ms")
    assert sum(parts_ms.values()) == pytest.approx(2500.0)
    assert rtt_ms == pytest.approx((0.7 * 0.02 + 0.3 * 0.09) * 1e3)
    assert row == {
        "seq": 1,
        "request_id": "r",
        "finished_s": 13.0,
        "replica": "b",
        "region": "region-of-b",
        "policy": "nearest",
        "weights_version": 1,
        "input_tokens": 260,
        "cached_tokens": 64,
        "estimated_cached_tokens": 0,
        "output_tokens": 20,
        "predicted_ttft_ms": None,
        "ttft_ms": 2500.0,
        "e2e_s": 3.5,
        "itl_ms_p95": 20.0,
        "status": 200,
        "retries": 1,
        "hedged": False,
        "terms": {"rtt": pytest.approx(rtt_ms)},
        "shadow_policy": None,
        "shadow_rank": None,
        "shadow_cost": None,
        "shadow_predicted_ttft_ms": None,
        "best_cached_tokens": 0,
        "client": "team-a",
        "model": "m",
        "continued": 0,
    }
    shown = router.view.decisions("r")[1].as_dict()
    assert (shown["client"], shown["model"]) == ("team-a", "m")


def test_model_name_of_any_length_is_in_no_record() -> None:
    router = make_router("a")
    finished(router, dispatched(submitted(router, a_request(model="x" * 257), now=0.0)).attempt_id, GONE, now=1.0)
    (row,) = router.samples.after(0)["samples"]
    assert (row["model"], router.view.decisions("r")[0].model) == (None, None)


def test_what_is_unknown_in_a_sample_is_null() -> None:
    router = Router(specs("a"), make_policy("random"), rng=np.random.default_rng(0), boot_id="boot")
    finished(router, dispatched(submitted(router, a_request(), now=0.0)).attempt_id, GONE, now=1.0)
    (row,) = router.samples.after(0)["samples"]
    assert (row["rtt_ms"], row["ttft_ms"], row["cached_tokens"], row["status"]) == (None, None, None, 499)


def test_a_stream_that_broke_is_no_success() -> None:
    router = make_router("a")
    attempt = dispatched(submitted(router, a_request(), now=0.0)).attempt_id
    router.on_first_token(attempt, now=0.5)
    router.on_finish(attempt, BROKEN, now=1.0)
    assert [sample.status for sample in router.samples] == [502]


def test_every_candidate_of_a_decision_can_be_explained_later() -> None:
    router = make_router("a", "b", policy="gorgo")
    router.replicas.drain("b", now=0.0)
    first = dispatched(submitted(router, a_request(prompt_tokens=1000), now=0.0))
    router.replicas.drain("b", False, now=0.0)
    router.on_finish(first.attempt_id, FAILED, now=1.0)
    explained = [decision.as_dict() for decision in router.view.decisions("r")]
    assert [one["replica"] for one in explained] == ["a", "b"]
    assert explained[0]["excluded"] == {"b": "draining"}
    (row,) = explained[0]["candidates"]
    assert row == {"replica": "a", "cost": 1005.0, "terms": {"rtt": 5.0, "queue": 0.0, "prefill": 1000.0}}
    assert router.view.decisions("other") == []


def test_decisions_kept_are_bounded() -> None:
    router = make_router("a", limits=RouterLimits(max_decisions=2))
    for index in range(3):
        router.submit(a_request(f"r{index}"), now=0.0)
    assert [len(router.view.decisions(f"r{index}")) for index in range(3)] == [0, 1, 1]


# -- the operator's view


def test_the_view_shows_what_an_operator_asks_for() -> None:
    replicas = [ReplicaSpec("a", "here", ("m",), kv_capacity_tokens=64_000), ReplicaSpec("b", "there", ("m",))]
    router = make_router(replicas=replicas)
    router.replicas.on_engine_sample("a", EngineSample(3, 1, 5000, max_running_requests=64), now=10.0)
    router.submit(a_request(model="m", blocks=PROMPT), now=11.0)
    router.replicas.drain("b", now=11.0)
    a, b = router.view.snapshots(now=12.0)
    assert (a.name, a.region, a.models, a.state, a.eligible) == ("a", "here", ("m",), "healthy", True)
    assert (a.rtt_ms, a.probe_age_s, a.scrape_age_s) == (10.0, 12.0, 2.0)
    assert (a.running_requests, a.queued_requests, a.used_tokens) == (3, 1, 5000)
    assert (a.kv_capacity_tokens, a.max_running_requests) == (64_000, 64)
    assert (a.index_blocks, a.index_tokens, a.attempts, a.failures) == (4, 256, 1, 0)
    assert (b.state, b.eligible, b.running_requests, b.scrape_age_s) == ("draining", False, None, None)
    assert b.as_dict()["in_flight_requests"] == 0


def test_the_view_shows_how_long_a_replica_stays_ejected() -> None:
    router = make_router("a", "b")
    fail_on(router, FAILED, 3)
    a, _ = router.view.snapshots(now=2.0)
    assert (a.state, a.ejected_for_s, a.eligible, a.failures) == ("ejected", 4.0, False, 3)


def test_reading_changes_nothing() -> None:
    router = make_router("a")
    router.submit(a_request(), now=0.0)
    router.view.snapshots(now=1.0)
    router.next_timer()
    assert isinstance(submitted(router, a_request("r2"), now=1.0)[0], Dispatch)


# -- an engine that has started again


@pytest.mark.parametrize("policy", ["gorgo", "gorgo-ms"])
def test_counters_that_go_back_are_an_engine_that_started_again_with_nothing_cached(policy: str) -> None:
    router = make_router("a", "b", policy=policy)
    first = dispatched(submitted(router, a_request("r1", blocks=PROMPT), now=0.0))
    assert first.replica == "a"
    router.on_finish(first.attempt_id, COMPLETED, now=1.0)
    router.replicas.on_engine_sample("a", EngineSample(prompt_tokens_total=256.0), now=2.0)
    assert believed(router)[:2] == [4, 0]
    router.replicas.on_engine_sample("a", EngineSample(prompt_tokens_total=0.0), now=3.0)
    assert believed(router)[:2] == [0, 0]
    assert [view.restarts for view in router.view.snapshots(now=3.0)] == [1, 0]
    router.check()


def test_restart_of_an_engine_is_one_event() -> None:
    router = make_router("a", "b")
    for total in (900.0, 900.0, 20.0, 30.0):
        router.replicas.on_engine_sample("a", EngineSample(prompt_tokens_total=total), now=1.0)
    assert list(router.fleet_events) == [ReplicaRestarted("a", "region-of-a")]


def test_a_partition_and_counters_that_stand_still_leave_belief_alone() -> None:
    router = make_router("a", "b")
    first = dispatched(submitted(router, a_request("r1", blocks=PROMPT), now=0.0))
    router.on_finish(first.attempt_id, COMPLETED, now=1.0)
    for sample in (
        EngineSample(prefill_tokens_total=256.0),
        None,
        EngineSample(),
        EngineSample(prefill_tokens_total=256.0),
    ):
        router.replicas.on_engine_sample("a", sample, now=2.0)
    assert believed(router)[:2] == [4, 0]
    assert [row.restarts for row in router.view.snapshots(now=2.0)] == [0, 0]
