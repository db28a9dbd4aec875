"""The Router's contract, event by event. Its property test is beside it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gorgo.core.actions import Dispatch, Reject
from gorgo.core.health import EjectionLimits
from gorgo.core.limits import RouterLimits
from gorgo.core.replica import ReplicaSpec
from gorgo.core.request import Ending, EngineSample, Outcome
from gorgo.core.router import Router
from gorgo.errors import UnknownReplica, WeightsError
from gorgo.policies.registry import make_policy
from tests.core.routers import (
    BROKEN,
    BUSY,
    COMPLETED,
    FAILED,
    GONE,
    REFUSED,
    a_request,
    blocks_of,
    dispatched,
    make_router,
    rejected,
    specs,
)

PROMPT = blocks_of(1, 2, 3, 4)


def load_of(router: Router, name: str) -> tuple[int, int, int]:
    (row,) = [row for row in router.fleet_view(now=0.0) if row.name == name]
    return row.in_flight_requests, row.in_flight_tokens, row.queued_prefill_tokens


def believed(router: Router, blocks: bytes = PROMPT) -> list[float]:
    return list(router.index.match(blocks, 3))


# -- load


def test_a_decision_and_its_reservation_are_one() -> None:
    router = make_router("a", "b", policy="least-request")
    first, second = (dispatched(router.submit(a_request(f"r{index}"), now=0.0)) for index in range(2))
    assert {first.replica, second.replica} == {"a", "b"}


def test_load_is_counted_at_dispatch_and_released_at_first_token_and_finish() -> None:
    router = make_router("a")
    attempt = dispatched(router.submit(a_request(prompt_tokens=256), now=0.0)).attempt_id
    assert load_of(router, "a") == (1, 256, 256)
    assert router.in_flight == 1
    assert router.on_first_token(attempt, now=1.0) == []
    assert load_of(router, "a") == (1, 256, 0)
    assert router.on_finish(attempt, COMPLETED, now=2.0) == []
    assert load_of(router, "a") == (0, 0, 0)
    assert router.in_flight == 0


@pytest.mark.parametrize("outcome", [COMPLETED, GONE, BROKEN, REFUSED, FAILED, BUSY], ids=lambda one: one.ending.value)
def test_every_ending_releases_once_however_often_it_is_told(outcome: Outcome) -> None:
    router = make_router("a")
    attempt = dispatched(router.submit(a_request(), now=0.0)).attempt_id
    for _ in range(3):
        router.on_finish(attempt, outcome, now=1.0)
        router.on_first_token(attempt, now=1.0)
    assert load_of(router, "a") == (0, 0, 0)
    assert len(router.samples) == 1


def test_unknown_attempts_are_ignored() -> None:
    router = make_router("a")
    assert router.on_first_token("nobody/1", now=0.0) == []
    assert router.on_finish("nobody/1", COMPLETED, now=0.0) == []


def test_a_request_id_used_twice_at_once_keeps_both_accounts_apart() -> None:
    router = make_router("a")
    first, second = (dispatched(router.submit(a_request("same"), now=0.0)).attempt_id for _ in range(2))
    assert first == "same/1"
    assert first != second
    router.on_finish(first, COMPLETED, now=1.0)
    router.on_finish(first, COMPLETED, now=1.0)
    assert load_of(router, "a")[0] == 1
    router.on_finish(second, COMPLETED, now=1.0)
    assert load_of(router, "a") == (0, 0, 0)


# -- refusals


def test_an_unknown_model_is_a_404_before_anything_else() -> None:
    limits = RouterLimits(max_in_flight=0)
    router = make_router(replicas=[ReplicaSpec("a", "x", ("m",))], limits=limits)
    reject = rejected(router.submit(a_request(model="other"), now=0.0))
    assert (reject.status, reject.code) == (404, "model_not_found")
    assert "'other'" in reject.message


def test_too_many_in_flight_is_a_429_with_retry_after() -> None:
    router = make_router("a", limits=RouterLimits(max_in_flight=1))
    attempt = dispatched(router.submit(a_request("one"), now=0.0)).attempt_id
    reject = rejected(router.submit(a_request("two"), now=0.0))
    assert (reject.status, reject.code, reject.retry_after_s) == (429, "too_many_in_flight", 1.0)
    router.on_finish(attempt, COMPLETED, now=1.0)
    dispatched(router.submit(a_request("two"), now=1.0))


def test_nobody_eligible_is_a_503_with_retry_after() -> None:
    router = make_router("a")
    router.drain("a", now=0.0)
    reject = rejected(router.submit(a_request(), now=0.0))
    assert (reject.status, reject.code, reject.retry_after_s) == (503, "no_replica", 1.0)
    router.drain("a", False, now=0.0)
    dispatched(router.submit(a_request(), now=0.0))


def test_retry_after_tells_when_the_first_ejection_ends() -> None:
    limits = RouterLimits(panic_threshold=0.0, ejection=EjectionLimits(failures=1, base_s=5.0))
    router = make_router("a", limits=limits)
    router.on_probe("a", None, now=10.0)
    assert rejected(router.submit(a_request(), now=12.0)).retry_after_s == 3.0


def test_an_empty_fleet_is_a_503_whatever_the_model() -> None:
    router = make_router("a")
    router.set_fleet([], now=0.0)
    assert rejected(router.submit(a_request(model="m"), now=0.0)).status == 503


def test_a_refusal_reserves_nothing_and_leaves_no_sample() -> None:
    router = make_router("a")
    router.drain("a", now=0.0)
    router.submit(a_request(), now=0.0)
    assert router.in_flight == 0
    assert len(router.samples) == 0


# -- pinned requests


def test_a_pinned_request_goes_only_there_even_while_it_drains() -> None:
    router = make_router("a", "b")
    router.drain("b", now=0.0)
    dispatch = dispatched(router.submit(a_request(pinned_replica="b"), now=0.0))
    assert dispatch.replica == "b"
    assert dispatch.decision.excluded == {"a": "pinned"}
    assert rejected(router.on_finish(dispatch.attempt_id, FAILED, now=1.0)).status == 502


def test_a_pinned_replica_that_is_gone_is_a_404() -> None:
    router = make_router("a", "b")
    reject = rejected(router.submit(a_request(pinned_replica="z"), now=0.0))
    assert (reject.status, reject.code) == (404, "replica_not_found")


# -- retries


def test_a_failure_before_content_goes_to_the_next_best_replica() -> None:
    router = make_router("a", "b", "c")
    first = dispatched(router.submit(a_request(), now=0.0))
    second = dispatched(router.on_finish(first.attempt_id, FAILED, now=1.0))
    third = dispatched(router.on_finish(second.attempt_id, BUSY, now=2.0))
    assert [first.replica, second.replica, third.replica] == ["a", "b", "c"]
    assert [first.attempt_id, second.attempt_id, third.attempt_id] == ["r/1", "r/2", "r/3"]
    assert third.decision.excluded == {"a": "tried", "b": "tried"}
    assert (load_of(router, "a"), load_of(router, "b")) == ((0, 0, 0), (0, 0, 0))


def test_attempts_are_bounded() -> None:
    router = make_router("a", "b", "c", limits=RouterLimits(max_attempts=2))
    first = dispatched(router.submit(a_request(), now=0.0))
    second = dispatched(router.on_finish(first.attempt_id, FAILED, now=1.0))
    assert rejected(router.on_finish(second.attempt_id, FAILED, now=2.0)).status == 502
    assert router.in_flight == 0


def test_never_the_same_replica_twice() -> None:
    router = make_router("a")
    attempt = dispatched(router.submit(a_request(), now=0.0)).attempt_id
    rejected(router.on_finish(attempt, FAILED, now=1.0))


@pytest.mark.parametrize(
    ("outcome", "status", "code", "retry_after_s"),
    [
        (FAILED, 502, "upstream_failed", None),
        (replace(FAILED, status=None, error="timeout before the first content"), 504, "upstream_timeout", None),
        (replace(FAILED, status=504), 504, "upstream_timeout", None),
        (BUSY, 503, "replicas_busy", 1.0),
        (replace(BUSY, status=429), 429, "replicas_busy", 1.0),
    ],
)
def test_the_last_failure_is_what_the_client_gets(
    outcome: Outcome, status: int, code: str, retry_after_s: float | None
) -> None:
    router = make_router("a")
    attempt = dispatched(router.submit(a_request(), now=0.0)).attempt_id
    reject = rejected(router.on_finish(attempt, outcome, now=1.0))
    assert (reject.status, reject.code, reject.retry_after_s) == (status, code, retry_after_s)
    assert [sample.status for sample in router.samples] == [status]


@pytest.mark.parametrize("outcome", [COMPLETED, GONE, BROKEN, REFUSED], ids=lambda one: one.ending.value)
def test_other_endings_are_not_retried(outcome: Outcome) -> None:
    router = make_router("a", "b")
    attempt = dispatched(router.submit(a_request(), now=0.0)).attempt_id
    assert router.on_finish(attempt, outcome, now=1.0) == []


def test_a_request_whose_time_is_over_is_not_tried_elsewhere_and_blames_nobody() -> None:
    router = make_router("a", "b")
    attempt = dispatched(router.submit(a_request(), now=0.0)).attempt_id
    reject = rejected(router.on_finish(attempt, Outcome(Ending.OUT_OF_TIME, error="total_timeout"), now=1.0))
    assert (reject.status, reject.code) == (504, "total_timeout")
    (view, _) = router.fleet_view(now=1.0)
    assert (view.failures, view.failures_in_a_row) == (0, 0)
    assert [sample.status for sample in router.samples] == [504]


def test_an_answer_that_is_cut_at_the_end_of_its_time_has_its_sample_and_nothing_more_to_say() -> None:
    router = make_router("a", "b")
    attempt = dispatched(router.submit(a_request(), now=0.0)).attempt_id
    router.on_first_token(attempt, now=0.5)
    assert router.on_finish(attempt, Outcome(Ending.OUT_OF_TIME, status=200, error="total_timeout"), now=1.0) == []
    assert [sample.status for sample in router.samples] == [504]
    assert router.in_flight == 0


@pytest.mark.parametrize(("error", "again"), [("timeout", False), ("connect_timeout", True), ("connect_failed", True)])
def test_what_never_reached_a_replica_is_tried_elsewhere_beyond_the_budget(error: str, again: bool) -> None:
    router = make_router("a", "b", limits=RouterLimits(retry_share=0.0, retry_minimum=0))
    attempt = dispatched(router.submit(a_request(), now=0.0)).attempt_id
    (action,) = router.on_finish(attempt, Outcome(Ending.FAILED_BEFORE_CONTENT, error=error), now=1.0)
    assert isinstance(action, Dispatch if again else Reject)


# -- health


def fail_on(router: Router, outcome: Outcome, times: int, *, now: float = 1.0) -> None:
    for index in range(times):
        attempt = dispatched(router.submit(a_request(f"f{index}", pinned_replica="a"), now=now)).attempt_id
        router.on_finish(attempt, outcome, now=now)


def test_a_replica_that_keeps_failing_is_left_out_and_tried_again_later() -> None:
    router = make_router("a", "b")
    fail_on(router, FAILED, 3)
    assert dispatched(router.submit(a_request("r1"), now=1.0)).replica == "b"
    assert router.next_timer() == 6.0
    router.handle_timer(now=6.0)
    trial = dispatched(router.submit(a_request("r2"), now=6.0))
    assert trial.replica == "a"
    assert dispatched(router.submit(a_request("r3"), now=6.0)).replica == "b"  # one trial at a time
    router.on_first_token(trial.attempt_id, now=6.5)
    assert dispatched(router.submit(a_request("r4"), now=7.0)).replica == "a"


def test_a_late_timer_changes_no_decision() -> None:
    """The back-off is over at 6 s whether or not the shell has called the timer by then."""
    router = make_router("a", "b")
    fail_on(router, FAILED, 3)
    assert dispatched(router.submit(a_request("r1"), now=5.9)).replica == "b"
    assert dispatched(router.submit(a_request("r2"), now=6.0)).replica == "a"


def test_a_trial_whose_client_leaves_makes_room_for_another() -> None:
    router = make_router("a", "b")
    fail_on(router, FAILED, 3)
    router.handle_timer(now=6.0)
    trial = dispatched(router.submit(a_request("r2"), now=6.0))
    router.on_finish(trial.attempt_id, GONE, now=6.5)
    assert dispatched(router.submit(a_request("r3"), now=7.0)).replica == "a"


def test_a_replica_that_answered_no_ping_is_tried_after_one_good_one_and_readmitted_after_two() -> None:
    router = make_router("a", "b")
    for now in (1.0, 2.0, 3.0):
        router.on_probe("a", None, now=now)
    assert dispatched(router.submit(a_request("r0"), now=3.5)).replica == "b"
    router.on_probe("a", 0.01, now=4.0)
    sent = [dispatched(router.submit(a_request(f"r{n}"), now=4.0)).replica for n in range(1, 4)]
    assert sent == ["a", "b", "b"]
    router.on_probe("a", 0.01, now=8.0)
    assert [dispatched(router.submit(a_request(f"s{n}"), now=9.0)).replica for n in range(3)] == ["a", "a", "a"]


@pytest.mark.parametrize("outcome", [GONE, REFUSED, BUSY, BROKEN], ids=lambda one: one.ending.value)
def test_what_is_not_the_replicas_fault_never_ejects(outcome: Outcome) -> None:
    router = make_router("a", "b")
    fail_on(router, outcome, 20)
    assert dispatched(router.submit(a_request(), now=1.0)).replica == "a"


def test_probes_and_samples_of_replicas_that_have_left_are_ignored() -> None:
    router = make_router("a")
    assert router.on_probe("gone", 0.1, now=0.0) == []
    assert router.on_engine_sample("gone", EngineSample(), now=0.0) == []
    assert router.on_engine_sample("a", None, now=0.0) == []


# -- what is believed cached


def test_siblings_see_a_prefix_at_dispatch() -> None:
    router = make_router("a", "b", "c")
    router.submit(a_request("r1", blocks=PROMPT), now=0.0)
    sibling = dispatched(router.submit(a_request("r2", blocks=PROMPT, prompt_tokens=300), now=0.0))
    assert sibling.decision.believed_cached_tokens == 256


def test_belief_never_exceeds_the_prompt() -> None:
    router = make_router("a")
    router.submit(a_request("r1", blocks=PROMPT), now=0.0)
    again = dispatched(router.submit(a_request("r2", blocks=PROMPT, prompt_tokens=200), now=0.0))
    assert again.decision.believed_cached_tokens == 200


@pytest.mark.parametrize("outcome", [FAILED, BUSY, GONE, REFUSED], ids=lambda one: one.ending.value)
def test_an_end_before_the_first_token_withdraws_the_belief(outcome: Outcome) -> None:
    router = make_router("a", "b", "c", limits=RouterLimits(max_attempts=1))
    attempt = dispatched(router.submit(a_request(blocks=PROMPT), now=0.0)).attempt_id
    assert believed(router) == [4, 0, 0]
    router.on_finish(attempt, outcome, now=1.0)
    assert believed(router) == [0, 0, 0]


@pytest.mark.parametrize("outcome", [COMPLETED, BROKEN, GONE], ids=lambda one: one.ending.value)
def test_a_first_token_confirms_the_belief_whatever_comes_after(outcome: Outcome) -> None:
    router = make_router("a", "b", "c")
    attempt = dispatched(router.submit(a_request(blocks=PROMPT), now=0.0)).attempt_id
    router.on_first_token(attempt, now=1.0)
    router.on_finish(attempt, outcome, now=2.0)
    assert believed(router) == [4, 0, 0]


def test_a_failure_does_not_take_what_others_have_confirmed() -> None:
    router = make_router("a", "b", "c", limits=RouterLimits(max_attempts=1))
    first = dispatched(router.submit(a_request("r1", blocks=PROMPT[:16]), now=0.0))
    router.on_first_token(first.attempt_id, now=1.0)
    second = dispatched(router.submit(a_request("r2", blocks=PROMPT), now=1.0))
    router.on_finish(second.attempt_id, FAILED, now=2.0)
    assert believed(router) == [2, 0, 0]


def test_flush_forgets_one_replica_or_all() -> None:
    router = make_router("a", "b", "c", policy="round-robin")
    for index in range(3):
        router.submit(a_request(f"r{index}", blocks=PROMPT), now=0.0)
    router.flush("b", now=1.0)
    assert believed(router) == [4, 0, 4]
    router.flush(now=1.0)
    assert believed(router) == [0, 0, 0]
    with pytest.raises(UnknownReplica):
        router.flush("z", now=1.0)


# -- fleet changes under open attempts


def test_a_late_finish_does_not_touch_the_replica_that_took_the_slot() -> None:
    router = make_router("a", "b")
    old = dispatched(router.submit(a_request("old", blocks=PROMPT), now=0.0))
    assert old.replica == "a"
    router.set_fleet(specs("n", "b"), now=1.0)
    router.on_probe("n", 0.001, now=1.0)
    new = dispatched(router.submit(a_request("new", prompt_tokens=100), now=1.0))
    assert new.replica == "n"
    router.on_first_token(old.attempt_id, now=2.0)
    router.on_finish(old.attempt_id, COMPLETED, now=2.0)
    assert load_of(router, "n") == (1, 100, 100)
    assert believed(router)[:2] == [0, 0]
    assert [sample.replica for sample in router.samples] == ["a"]


def test_a_replica_that_comes_back_starts_without_load_or_belief() -> None:
    router = make_router("a", "b")
    old = dispatched(router.submit(a_request("old", blocks=PROMPT), now=0.0))
    router.set_fleet(specs("b"), now=1.0)
    router.set_fleet(specs("a", "b"), now=2.0)
    router.on_finish(old.attempt_id, GONE, now=3.0)
    assert load_of(router, "a") == (0, 0, 0)
    assert believed(router)[:2] == [0, 0]


def test_a_failure_on_a_replica_that_has_left_is_retried_on_the_fleet_as_it_is() -> None:
    router = make_router("a")
    old = dispatched(router.submit(a_request(), now=0.0))
    router.set_fleet(specs("n"), now=1.0)
    assert dispatched(router.on_finish(old.attempt_id, FAILED, now=2.0)).replica == "n"


def test_who_stays_keeps_its_belief() -> None:
    router = make_router("a", "b", "c")
    router.submit(a_request(blocks=PROMPT), now=0.0)
    router.set_fleet(specs("a", "d", "e"), now=1.0)
    assert believed(router) == [4, 0, 0]


def test_other_limits_hold_from_the_next_event_on() -> None:
    router = make_router("a", "b")
    first = dispatched(router.submit(a_request("first", blocks=PROMPT), now=0.0))
    router.on_probe("a", 0.1, now=0.0)
    limits = replace(
        router.limits, max_attempts=1, max_in_flight=1, stale_after_s=5.0, rtt_ewma_alpha=1.0, max_index_blocks=2
    )
    router.set_limits(limits, now=1.0)
    assert rejected(router.submit(a_request("second"), now=1.0)).status == 429
    rejected(router.on_finish(first.attempt_id, FAILED, now=1.0))
    router.on_probe("a", 0.3, now=2.0)
    assert router.fleet_view(now=2.0)[0].rtt_ms == pytest.approx(300)
    assert router.next_timer() == 5.0  # of the other replica, probed at 0
    dispatched(router.submit(a_request("third", blocks=PROMPT), now=2.0))
    assert router.index.stored_blocks <= 2


# -- weights and policies


def test_weights_get_a_new_version_and_decide_from_then_on() -> None:
    router = make_router("a", policy="gorgo")
    assert router.weights.version == 1
    weights = router.set_weights({"w_rtt": 1.0}, now=0.0)
    assert (weights.version, dict(weights)) == (2, {"w_rtt": 1.0, "w_queue": 0.1})
    assert dispatched(router.submit(a_request(), now=0.0)).decision.weights_version == 2


def test_a_wrong_weight_changes_nothing() -> None:
    router = make_router("a", policy="gorgo")
    before = router.weights
    with pytest.raises(WeightsError):
        router.set_weights({"w_rtt": 1.0, "w_queue": 9.0}, now=0.0)
    with pytest.raises(WeightsError):
        router.set_policy(make_policy("nearest"), {"w_rtt": 1.0}, now=0.0)
    assert router.weights is before
    assert router.policy.name == "gorgo"


def test_a_new_policy_starts_from_its_own_weights_under_a_new_version() -> None:
    router = make_router("a", "b", policy="gorgo")
    router.set_weights({"w_rtt": 1.0}, now=0.0)
    weights = router.set_policy(make_policy("prefix-threshold"), {"tau": 0.2}, now=0.0)
    assert (weights.version, dict(weights)) == (3, {"tau": 0.2})
    assert dispatched(router.submit(a_request(), now=0.0)).decision.policy == "prefix-threshold"


def test_a_sample_counts_for_the_weights_it_was_routed_under() -> None:
    router = make_router("a", policy="gorgo")
    attempt = dispatched(router.submit(a_request(), now=0.0)).attempt_id
    router.set_weights({"w_rtt": 1.0}, now=0.5)
    router.on_finish(attempt, COMPLETED, now=1.0)
    assert [sample.weights_version for sample in router.samples] == [1]


# -- samples and decisions


def test_a_sample_tells_the_whole_request() -> None:
    router = make_router("a", "b")
    router.on_probe("b", 0.09, now=9.0)
    first = dispatched(router.submit(a_request(received_s=9.5), now=10.0))
    second = dispatched(router.on_finish(first.attempt_id, FAILED, now=11.0))
    router.on_first_token(second.attempt_id, now=12.0)
    end = Outcome(Ending.COMPLETED, 200, prompt_tokens=260, cached_tokens=64, output_tokens=20, itl_s_p95=0.02)
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
        "believed_cached_tokens": 0,
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
    }


def test_what_is_unknown_in_a_sample_is_null() -> None:
    router = Router(specs("a"), make_policy("random"), rng=np.random.default_rng(0), boot_id="boot")
    router.on_finish(dispatched(router.submit(a_request(), now=0.0)).attempt_id, GONE, now=1.0)
    (row,) = router.samples.after(0)["samples"]
    assert (row["rtt_ms"], row["ttft_ms"], row["cached_tokens"], row["status"]) == (None, None, None, 499)


def test_a_stream_that_broke_is_no_success() -> None:
    router = make_router("a")
    attempt = dispatched(router.submit(a_request(), now=0.0)).attempt_id
    router.on_first_token(attempt, now=0.5)
    router.on_finish(attempt, BROKEN, now=1.0)
    assert [sample.status for sample in router.samples] == [502]


def test_every_candidate_of_a_decision_can_be_explained_later() -> None:
    router = make_router("a", "b", policy="gorgo")
    router.drain("b", now=0.0)
    first = dispatched(router.submit(a_request(prompt_tokens=1000), now=0.0))
    router.drain("b", False, now=0.0)
    router.on_finish(first.attempt_id, FAILED, now=1.0)
    explained = [decision.as_dict() for decision in router.decisions("r")]
    assert [one["replica"] for one in explained] == ["a", "b"]
    assert explained[0]["excluded"] == {"b": "draining"}
    (row,) = explained[0]["candidates"]
    assert row == {"replica": "a", "cost": 1005.0, "terms": {"rtt": 5.0, "queue": 0.0, "prefill": 1000.0}}
    assert router.decisions("other") == []


def test_decisions_kept_are_bounded() -> None:
    router = make_router("a", limits=RouterLimits(decisions_kept=2))
    for index in range(3):
        router.submit(a_request(f"r{index}"), now=0.0)
    assert [len(router.decisions(f"r{index}")) for index in range(3)] == [0, 1, 1]


# -- the operator's view


def test_the_view_shows_what_an_operator_asks_for() -> None:
    replicas = [ReplicaSpec("a", "here", ("m",), kv_capacity_tokens=64_000), ReplicaSpec("b", "there", ("m",))]
    router = make_router(replicas=replicas)
    router.on_engine_sample("a", EngineSample(3, 1, 5000, max_running_requests=64), now=10.0)
    router.submit(a_request(model="m", blocks=PROMPT), now=11.0)
    router.drain("b", now=11.0)
    a, b = router.fleet_view(now=12.0)
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
    a, _ = router.fleet_view(now=2.0)
    assert (a.state, a.ejected_for_s, a.eligible, a.failures) == ("ejected", 4.0, False, 3)


def test_reading_changes_nothing() -> None:
    router = make_router("a")
    router.submit(a_request(), now=0.0)
    router.fleet_view(now=1.0)
    router.next_timer()
    assert isinstance(router.submit(a_request("r2"), now=1.0)[0], Dispatch)
