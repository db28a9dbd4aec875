"""The Router's contract, event by event. Its property test is beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gorgo.core.fleet.replica import ReplicaSpec
from gorgo.core.limits import OutlierLimits, OverloadLimits, RouterLimits
from gorgo.core.messages.actions import Dispatch, Hold, Reject
from gorgo.core.messages.request import AttemptResult, EngineSample, Outcome
from gorgo.errors import UnknownReplica
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
    submitted,
    timed,
)

# -- load


def test_a_decision_and_its_reservation_are_one() -> None:
    router = make_router("a", "b", policy="least-request")
    first, second = (dispatched(submitted(router, a_request(f"r{index}"), now=0.0)) for index in range(2))
    assert {first.replica, second.replica} == {"a", "b"}


def test_load_is_counted_at_dispatch_and_released_at_first_token_and_finish() -> None:
    router = make_router("a")
    attempt = dispatched(submitted(router, a_request(prompt_tokens=256), now=0.0)).attempt_id
    assert load_of(router, "a") == (1, 256, 256)
    assert router.in_flight == 1
    assert router.on_first_token(attempt, now=1.0) == []
    assert load_of(router, "a") == (1, 256, 0)
    assert finished(router, attempt, COMPLETED, now=2.0) == []
    assert load_of(router, "a") == (0, 0, 0)
    assert router.in_flight == 0


@pytest.mark.parametrize("outcome", [COMPLETED, GONE, BROKEN, REFUSED, FAILED, BUSY], ids=lambda one: one.result.value)
def test_every_ending_releases_once_however_often_it_is_told(outcome: Outcome) -> None:
    router = make_router("a")
    attempt = dispatched(submitted(router, a_request(), now=0.0)).attempt_id
    for _ in range(3):
        router.on_finish(attempt, outcome, now=1.0)
        router.on_first_token(attempt, now=1.0)
    assert load_of(router, "a") == (0, 0, 0)
    assert len(router.samples) == 1


def test_unknown_attempts_are_ignored() -> None:
    router = make_router("a")
    assert router.on_first_token("nobody/1", now=0.0) == []
    assert finished(router, "nobody/1", COMPLETED, now=0.0) == []


# -- refusals


def test_an_unknown_model_is_a_404_before_anything_else() -> None:
    limits = RouterLimits(max_in_flight=0)
    router = make_router(replicas=[ReplicaSpec("a", "x", ("m",))], limits=limits)
    reject = rejected(submitted(router, a_request(model="other"), now=0.0))
    assert (reject.status, reject.code) == (404, "model_not_found")
    assert "'other'" in reject.message


def test_too_many_in_flight_is_a_429_with_retry_after() -> None:
    router = make_router("a", limits=RouterLimits(max_in_flight=1))
    attempt = dispatched(submitted(router, a_request("one"), now=0.0)).attempt_id
    reject = rejected(submitted(router, a_request("two"), now=0.0))
    assert (reject.status, reject.code, reject.retry_after_s) == (429, "too_many_in_flight", 1.0)
    router.on_finish(attempt, COMPLETED, now=1.0)
    dispatched(submitted(router, a_request("two"), now=1.0))


def test_nobody_eligible_is_a_503_with_retry_after() -> None:
    router = make_router("a")
    router.replicas.drain("a", now=0.0)
    reject = rejected(submitted(router, a_request(), now=0.0))
    assert (reject.status, reject.code, reject.retry_after_s) == (503, "no_replica", 1.0)
    router.replicas.drain("a", False, now=0.0)
    dispatched(submitted(router, a_request(), now=0.0))


def test_retry_after_tells_when_the_first_ejection_ends() -> None:
    limits = RouterLimits(panic_threshold=0.0, outlier=OutlierLimits(failures=1, base_s=5.0))
    router = make_router("a", limits=limits)
    router.replicas.on_probe("a", None, now=10.0)
    assert rejected(submitted(router, a_request(), now=12.0)).retry_after_s == 3.0


def test_an_empty_fleet_is_a_503_whatever_the_model() -> None:
    router = make_router("a")
    router.replicas.set_fleet([], now=0.0)
    assert rejected(submitted(router, a_request(model="m"), now=0.0)).status == 503


def test_a_refusal_reserves_nothing_and_leaves_no_sample() -> None:
    router = make_router("a")
    router.replicas.drain("a", now=0.0)
    router.submit(a_request(), now=0.0)
    assert router.in_flight == 0
    assert len(router.samples) == 0


# -- pinned requests


def test_a_pinned_request_goes_only_there_even_while_it_drains() -> None:
    router = make_router("a", "b")
    router.replicas.drain("b", now=0.0)
    dispatch = dispatched(submitted(router, a_request(pinned_replica="b"), now=0.0))
    assert dispatch.replica == "b"
    assert dispatch.decision.excluded == {"a": "pinned"}
    assert rejected(finished(router, dispatch.attempt_id, FAILED, now=1.0)).status == 502


def test_a_pinned_replica_that_is_gone_is_a_404() -> None:
    router = make_router("a", "b")
    reject = rejected(submitted(router, a_request(pinned_replica="z"), now=0.0))
    assert (reject.status, reject.code) == (404, "replica_not_found")


# -- retries


def test_a_failure_before_content_goes_to_the_next_best_replica() -> None:
    router = make_router("a", "b", "c")
    first = dispatched(submitted(router, a_request(), now=0.0))
    second = dispatched(finished(router, first.attempt_id, FAILED, now=1.0))
    third = dispatched(finished(router, second.attempt_id, BUSY, now=2.0))
    assert [first.replica, second.replica, third.replica] == ["a", "b", "c"]
    assert [first.attempt_id, second.attempt_id, third.attempt_id] == ["r/1", "r/2", "r/3"]
    assert third.decision.excluded == {"a": "tried", "b": "tried"}
    assert (load_of(router, "a"), load_of(router, "b")) == ((0, 0, 0), (0, 0, 0))


def test_attempts_are_bounded() -> None:
    router = make_router("a", "b", "c", limits=RouterLimits(max_attempts=2))
    first = dispatched(submitted(router, a_request(), now=0.0))
    second = dispatched(finished(router, first.attempt_id, FAILED, now=1.0))
    assert rejected(finished(router, second.attempt_id, FAILED, now=2.0)).status == 502
    assert router.in_flight == 0


def test_never_the_same_replica_twice() -> None:
    router = make_router("a")
    attempt = dispatched(submitted(router, a_request(), now=0.0)).attempt_id
    rejected(finished(router, attempt, FAILED, now=1.0))


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
    attempt = dispatched(submitted(router, a_request(), now=0.0)).attempt_id
    reject = rejected(finished(router, attempt, outcome, now=1.0))
    assert (reject.status, reject.code, reject.retry_after_s) == (status, code, retry_after_s)
    assert [sample.status for sample in router.samples] == [status]


@pytest.mark.parametrize("outcome", [COMPLETED, GONE, BROKEN, REFUSED], ids=lambda one: one.result.value)
def test_other_endings_are_not_retried(outcome: Outcome) -> None:
    router = make_router("a", "b")
    attempt = dispatched(submitted(router, a_request(), now=0.0)).attempt_id
    assert finished(router, attempt, outcome, now=1.0) == []


def test_a_request_whose_time_is_over_is_not_tried_elsewhere_and_blames_nobody() -> None:
    router = make_router("a", "b")
    attempt = dispatched(submitted(router, a_request(), now=0.0)).attempt_id
    reject = rejected(
        finished(router, attempt, Outcome(AttemptResult.DEADLINE_EXCEEDED, error="total_timeout"), now=1.0)
    )
    assert (reject.status, reject.code) == (504, "total_timeout")
    (view, _) = router.view.snapshots(now=1.0)
    assert (view.failures, view.failures_in_a_row) == (0, 0)
    assert [sample.status for sample in router.samples] == [504]


def test_an_answer_that_is_cut_at_the_end_of_its_time_has_its_sample_and_nothing_more_to_say() -> None:
    router = make_router("a", "b")
    attempt = dispatched(submitted(router, a_request(), now=0.0)).attempt_id
    router.on_first_token(attempt, now=0.5)
    assert (
        finished(router, attempt, Outcome(AttemptResult.DEADLINE_EXCEEDED, status=200, error="total_timeout"), now=1.0)
        == []
    )
    assert [sample.status for sample in router.samples] == [504]
    assert router.in_flight == 0


@pytest.mark.parametrize(("error", "again"), [("timeout", False), ("connect_timeout", True), ("connect_failed", True)])
def test_what_never_reached_a_replica_is_tried_elsewhere_beyond_the_budget(error: str, again: bool) -> None:
    router = make_router("a", "b", limits=RouterLimits(retry_budget_ratio=0.0, retry_budget_minimum=0))
    attempt = dispatched(submitted(router, a_request(), now=0.0)).attempt_id
    (action,) = finished(router, attempt, Outcome(AttemptResult.FAILED_BEFORE_CONTENT, error=error), now=1.0)
    assert isinstance(action, Dispatch if again else Reject)


# -- health


def test_a_replica_that_keeps_failing_is_left_out_and_tried_again_later() -> None:
    router = make_router("a", "b")
    fail_on(router, FAILED, 3)
    assert dispatched(submitted(router, a_request("r1"), now=1.0)).replica == "b"
    assert router.next_timer() == 6.0
    router.handle_timer(now=6.0)
    trial = dispatched(submitted(router, a_request("r2"), now=6.0))
    assert trial.replica == "a"
    assert dispatched(submitted(router, a_request("r3"), now=6.0)).replica == "b"  # one trial at a time
    router.on_first_token(trial.attempt_id, now=6.5)
    assert dispatched(submitted(router, a_request("r4"), now=7.0)).replica == "a"


def test_a_late_timer_changes_no_decision() -> None:
    """The back-off is over at 6 s whether or not the shell has called the timer by then."""
    router = make_router("a", "b")
    fail_on(router, FAILED, 3)
    assert dispatched(submitted(router, a_request("r1"), now=5.9)).replica == "b"
    assert dispatched(submitted(router, a_request("r2"), now=6.0)).replica == "a"


def test_a_late_timer_keeps_no_request_waiting() -> None:
    """The replica is open again at 0.8 s: who comes at 0.9 finds those before it gone, timer or not."""
    limits = RouterLimits(overload=OverloadLimits(queue_enabled=True))
    router = make_router(policy="gorgo-ms", replicas=[timed("a")], limits=limits)
    dispatched(submitted(router, a_request("r0", prompt_tokens=1000), now=0.0))
    assert isinstance(submitted(router, a_request("r1", prompt_tokens=100), now=0.0)[-1], Hold)
    before, own = submitted(router, a_request("r2", prompt_tokens=100, received_s=0.9), now=0.9)
    assert (before.request_id, type(before), own.request_id) == ("r1", Dispatch, "r2")


def test_figures_that_went_stale_between_two_requests_decide_nothing() -> None:
    router = make_router("a", "b")
    router.replicas.on_probe("b", 0.03, now=60.0)
    assert dispatched(submitted(router, a_request("r1"), now=89.9)).replica == "a"
    decision = dispatched(submitted(router, a_request("r2"), now=90.0)).decision
    assert decision.terms["rtt"].tolist() == pytest.approx([23.0, 23.0]), "a's is unknown by now"


@pytest.mark.parametrize("event", ["first_token", "finish", "probe", "abandon", "submit"])
def test_the_next_timer_is_at_the_time_of_the_last_event_when_a_replica_may_have_opened(event: str) -> None:
    """One waits and something may have opened its replica: the next look is due at once."""
    limits = RouterLimits(overload=OverloadLimits(queue_enabled=True, max_concurrency_per_replica=1))
    router = make_router(policy="gorgo-ms", replicas=[timed("a"), timed("b")], limits=limits)
    first, second = (dispatched(submitted(router, a_request(f"r{n}", prompt_tokens=100), now=0.0)) for n in range(2))
    for name in ("waits", "other"):
        assert isinstance(submitted(router, a_request(name, prompt_tokens=100), now=0.0)[-1], Hold)
    if event == "first_token":
        router.on_first_token(first.attempt_id, now=5.0)
    elif event == "finish":
        router.on_finish("never", COMPLETED, now=5.0)
    elif event == "probe":
        router.replicas.on_probe("never", 0.1, now=5.0)
    elif event == "abandon":
        router.abandon("other", now=5.0)
    else:
        assert isinstance(submitted(router, a_request("more", prompt_tokens=100), now=5.0)[-1], Hold)
    router.replicas.drain(second.replica, now=5.0)
    assert router.next_timer() == 5.0


def test_a_trial_whose_client_leaves_makes_room_for_another() -> None:
    router = make_router("a", "b")
    fail_on(router, FAILED, 3)
    router.handle_timer(now=6.0)
    trial = dispatched(submitted(router, a_request("r2"), now=6.0))
    router.on_finish(trial.attempt_id, GONE, now=6.5)
    assert dispatched(submitted(router, a_request("r3"), now=7.0)).replica == "a"


def test_a_replica_that_answered_no_ping_is_tried_after_one_good_one_and_readmitted_after_two() -> None:
    router = make_router("a", "b")
    for now in (1.0, 2.0, 3.0):
        router.replicas.on_probe("a", None, now=now)
    assert dispatched(submitted(router, a_request("r0"), now=3.5)).replica == "b"
    router.replicas.on_probe("a", 0.01, now=4.0)
    sent = [dispatched(submitted(router, a_request(f"r{n}"), now=4.0)).replica for n in range(1, 4)]
    assert sent == ["a", "b", "b"]
    router.replicas.on_probe("a", 0.01, now=8.0)
    assert [dispatched(submitted(router, a_request(f"s{n}"), now=9.0)).replica for n in range(3)] == ["a", "a", "a"]


@pytest.mark.parametrize("outcome", [GONE, REFUSED, BUSY], ids=lambda one: one.result.value)
def test_what_is_not_the_replicas_fault_never_ejects(outcome: Outcome) -> None:
    router = make_router("a", "b")
    fail_on(router, outcome, 20)
    assert dispatched(submitted(router, a_request(), now=2.0)).replica == "a"


def test_probes_and_samples_of_replicas_that_have_left_are_ignored() -> None:
    router = make_router("a")
    assert router.replicas.on_probe("gone", 0.1, now=0.0) == []
    assert router.replicas.on_engine_sample("gone", EngineSample(), now=0.0) == []
    assert router.replicas.on_engine_sample("a", None, now=0.0) == []


# -- what is believed cached


def test_siblings_see_a_prefix_at_dispatch() -> None:
    router = make_router("a", "b", "c")
    router.submit(a_request("r1", blocks=PROMPT), now=0.0)
    sibling = dispatched(submitted(router, a_request("r2", blocks=PROMPT, prompt_tokens=300), now=0.0))
    assert sibling.decision.estimated_cached_tokens == 256


def test_belief_never_exceeds_the_prompt() -> None:
    router = make_router("a")
    router.submit(a_request("r1", blocks=PROMPT), now=0.0)
    again = dispatched(submitted(router, a_request("r2", blocks=PROMPT, prompt_tokens=200), now=0.0))
    assert again.decision.estimated_cached_tokens == 200


@pytest.mark.parametrize("outcome", [FAILED, BUSY, GONE, REFUSED], ids=lambda one: one.result.value)
def test_an_end_before_the_first_token_withdraws_the_belief(outcome: Outcome) -> None:
    router = make_router("a", "b", "c", limits=RouterLimits(max_attempts=1))
    attempt = dispatched(submitted(router, a_request(blocks=PROMPT), now=0.0)).attempt_id
    assert believed(router) == [4, 0, 0]
    router.on_finish(attempt, outcome, now=1.0)
    assert believed(router)[0] == 0


@pytest.mark.parametrize("outcome", [COMPLETED, BROKEN, GONE], ids=lambda one: one.result.value)
def test_a_first_token_confirms_the_belief_whatever_comes_after(outcome: Outcome) -> None:
    router = make_router("a", "b", "c")
    attempt = dispatched(submitted(router, a_request(blocks=PROMPT), now=0.0)).attempt_id
    router.on_first_token(attempt, now=1.0)
    router.on_finish(attempt, outcome, now=2.0)
    assert believed(router) == [4, 0, 0]


def test_a_failure_does_not_take_what_others_have_confirmed() -> None:
    router = make_router("a", "b", "c", limits=RouterLimits(max_attempts=1))
    first = dispatched(submitted(router, a_request("r1", blocks=PROMPT[:16]), now=0.0))
    router.on_first_token(first.attempt_id, now=1.0)
    second = dispatched(submitted(router, a_request("r2", blocks=PROMPT), now=1.0))
    router.on_finish(second.attempt_id, FAILED, now=2.0)
    assert believed(router) == [2, 0, 0]


def test_flush_forgets_one_replica_or_all() -> None:
    router = make_router("a", "b", "c", policy="round-robin")
    for index in range(3):
        router.submit(a_request(f"r{index}", blocks=PROMPT), now=0.0)
    router.caches.flush("b", now=1.0)
    assert believed(router) == [4, 0, 4]
    router.caches.flush(now=1.0)
    assert believed(router) == [0, 0, 0]
    with pytest.raises(UnknownReplica):
        router.caches.flush("z", now=1.0)


# -- bytes per token


def test_usage_of_a_response_teaches_the_bytes_per_token_of_its_model() -> None:
    router = make_router("a")
    outcome = replace(COMPLETED, prompt_tokens=9_000)
    for request_id, text_bytes in (("exact", None), ("estimated", 20_000)):
        request = replace(a_request(request_id), model="tiny", text_bytes=text_bytes)
        attempt = dispatched(submitted(router, request, now=0.0))
        router.on_finish(attempt.attempt_id, outcome, now=1.0)
        expected = 4.0 if text_bytes is None else 2.4
        assert router.token_ratios.ratio("tiny") == expected
    assert router.token_ratios.ratio("another") == 4.0
