"""A 5xx or a timeout is the request's fault if several replicas fail it alike, and the replica's in any other case."""

from __future__ import annotations

import pytest

from gorgo.core.limits import RouterLimits
from gorgo.core.messages.actions import Dispatch, Forward, Reject
from gorgo.core.messages.request import AttemptResult, Outcome
from gorgo.core.router import Router
from tests.core.routers import COMPLETED, a_request, dispatched, finished, make_router, submitted

FAILURES = {
    "500": Outcome(AttemptResult.FAILED_BEFORE_CONTENT, status=500, error="status_500", unsent=True),
    "502": Outcome(AttemptResult.FAILED_BEFORE_CONTENT, status=502, error="status_502", unsent=True),
    "timeout": Outcome(AttemptResult.FAILED_BEFORE_CONTENT, error="timeout"),
}
#: Enough for retries of all.
LIMITS = RouterLimits(retry_budget_minimum=1000)


def serve(router: Router, number: int, ends: dict[str, Outcome], *, now: float) -> tuple[list[str], object]:
    """Serve a request; return the replicas that had it, and the last action."""
    action: object = dispatched(submitted(router, a_request(f"r{number}", received_s=now), now=now))
    names = []
    while isinstance(action, Dispatch):
        names.append(action.replica)
        action = next(iter(finished(router, action.attempt_id, ends.get(action.replica, COMPLETED), now=now)), None)
    return names, action


@pytest.mark.parametrize("kind", FAILURES)
def test_what_every_replica_fails_alike_ejects_none_however_often(kind: str) -> None:
    router = make_router(*"abcd", limits=LIMITS)
    for number in range(50):
        names, end = serve(router, number, dict.fromkeys("abcd", FAILURES[kind]), now=1.0 + number / 10)
        assert len(names) == 3
        if kind == "timeout":
            assert isinstance(end, Reject)
            assert end.code == "upstream_timeout"
        else:
            assert end == Forward(f"r{number}"), "the client gets the engine's own answer"
    assert set(router.view.health_states().values()) == {"healthy"}
    assert {sample.status for sample in router.samples} == {504 if kind == "timeout" else int(kind)}


@pytest.mark.parametrize("kind", FAILURES)
def test_a_replica_that_fails_what_another_answers_is_ejected_after_three(kind: str) -> None:
    router = make_router(*"ab", limits=LIMITS)
    served = [serve(router, number, {"a": FAILURES[kind]}, now=1.0 + number / 10)[0] for number in range(6)]
    assert served == [["a", "b"]] * 3 + [["b"]] * 3


def test_failures_that_differ_are_each_replica_s_own_and_a_failure_without_an_answer_is_a_reject() -> None:
    router = make_router(*"ab", limits=LIMITS)
    for number in range(3):
        _, end = serve(router, number, {"a": FAILURES["500"], "b": FAILURES["timeout"]}, now=1.0 + number / 10)
        assert isinstance(end, Reject)
    assert set(router.view.health_states().values()) == {"ejected"}


def test_a_replica_with_failures_of_open_requests_pauses_until_one_of_them_has_ended() -> None:
    router = make_router(*"ab", limits=LIMITS)
    retried = []
    for number in range(3):
        first = dispatched(submitted(router, a_request(f"r{number}"), now=1.0))
        assert first.replica == "a"
        retried.append(dispatched(finished(router, first.attempt_id, FAILURES["500"], now=1.0)))
    assert dispatched(submitted(router, a_request("next"), now=1.1)).replica == "b"
    finished(router, retried[0].attempt_id, FAILURES["500"], now=1.2)
    assert dispatched(submitted(router, a_request("after"), now=1.3)).replica == "a", "that one was the request's fault"
    for other in retried[1:]:
        router.on_first_token(other.attempt_id, now=1.4)
    assert router.view.health_states()["a"] == "healthy", "two failures of its own"


def test_a_refusal_by_another_replica_says_that_the_request_is_at_fault() -> None:
    router = make_router(*"ab", limits=LIMITS)
    refused = Outcome(AttemptResult.UPSTREAM_4XX, status=400, unsent=True)
    for number in range(3):
        serve(router, number, {"a": FAILURES["500"], "b": refused}, now=1.0 + number)
    assert router.view.health_states()["a"] == "healthy"
