"""Requests that only some replicas may serve: through the first choice, the queue, retries and hedges."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gorgo.core.fleet.spec import ReplicaSpec
from gorgo.core.limits import HedgeLimits, OverloadLimits, RouterLimits
from gorgo.core.messages.actions import Hedge, Hold
from gorgo.core.messages.request import RouteRequest
from tests.core.routers import (
    COMPLETED,
    FAILED,
    a_request,
    dispatched,
    fail_on,
    finished,
    make_router,
    rejected,
    submitted,
    timed,
)


def only(*names: str, request_id: str = "r", **options: object) -> RouteRequest:
    return replace(a_request(request_id, **options), replicas=frozenset(names))  # type: ignore[arg-type]


def test_a_request_goes_to_the_best_replica_of_its_subset() -> None:
    router = make_router("a", "b", "c")
    sent = dispatched(submitted(router, only("c", "b", "unknown"), now=1.0))
    assert sent.replica == "b"
    assert sent.decision.candidates == ("b", "c")
    assert sent.decision.excluded == {"a": "subset"}


def test_a_retry_stays_in_the_subset() -> None:
    router = make_router("a", "b", "c")
    first = dispatched(submitted(router, only("b", "c"), now=1.0))
    again = dispatched(finished(router, first.attempt_id, FAILED, now=1.1))
    assert (first.replica, again.replica) == ("b", "c")
    assert rejected(finished(router, again.attempt_id, FAILED, now=1.2)).code == "upstream_failed"


def test_a_queued_request_waits_for_its_subset_while_others_are_free() -> None:
    limits = RouterLimits(overload=OverloadLimits(queue_enabled=True, max_concurrency_per_replica=1))
    router = make_router(policy="gorgo-ms", replicas=[timed("a"), timed("b")], limits=limits)
    first = dispatched(submitted(router, only("b"), now=0.0))
    assert submitted(router, only("b", request_id="next"), now=0.1) == [Hold("next")]
    assert router.on_first_token(first.attempt_id, now=0.3) == []
    assert dispatched(finished(router, first.attempt_id, COMPLETED, now=1.0)).replica == "b"


def test_a_late_request_is_hedged_within_its_subset_or_not_at_all() -> None:
    limits = RouterLimits(hedging=HedgeLimits(budget_ratio=1.0, window_s=1000.0))
    for subset, second in (("ac", "c"), ("a", None)):
        router = make_router(policy="gorgo-ms", replicas=[timed("a"), timed("b"), timed("c")], limits=limits)
        for number in range(2):
            before = dispatched(submitted(router, a_request(f"before-{number}", received_s=-9.0), now=-9.0)).attempt_id
            router.on_first_token(before, now=-8.9)
            router.on_finish(before, COMPLETED, now=-8.9)
        assert dispatched(submitted(router, only(*subset), now=0.0)).replica == "a"
        due_s = router.next_timer()
        assert due_s is not None
        hedges = router.handle_timer(now=due_s)
        assert [each.dispatch.replica for each in hedges if isinstance(each, Hedge)] == ([second] if second else [])


def test_ejection_for_failed_attempts_is_ignored_where_the_whole_subset_failed() -> None:
    router = make_router("a", "b", "c")
    fail_on(router, FAILED, 3)
    assert dispatched(submitted(router, a_request(), now=2.0)).replica == "b"
    sent = dispatched(submitted(router, only("a", request_id="s"), now=2.0))
    assert sent.replica == "a"
    assert sent.decision.excluded == {"b": "subset", "c": "subset"}


@pytest.mark.parametrize(
    ("subset", "message"),
    [
        ((), "no replica of the gateway's subset (0 names) is in the fleet"),
        (("x", "y"), "no replica of the gateway's subset (2 names) serves the request"),
        (("other",), "no replica of the gateway's subset (1 names) serves the request"),
    ],
)
def test_a_subset_without_a_replica_of_the_model_is_refused_at_once(subset: tuple[str, ...], message: str) -> None:
    replicas = [ReplicaSpec("a", "here", models=("m",)), ReplicaSpec("other", "here", models=("n",))]
    limits = RouterLimits(overload=OverloadLimits(queue_enabled=True, no_replica_wait_s=5.0))
    router = make_router(replicas=replicas, limits=limits)
    refused = rejected(submitted(router, only(*subset, model="m"), now=1.0))
    assert (refused.status, refused.code, refused.message, refused.retry_after_s) == (503, "no_replica", message, 1.0)
    assert (router.in_flight, router.queued) == (0, 0)


def test_a_subset_of_draining_replicas_is_refused_or_waits_as_the_limits_say() -> None:
    for wait_s in (0.0, 5.0):
        limits = RouterLimits(overload=OverloadLimits(no_replica_wait_s=wait_s))
        router = make_router("a", "b", limits=limits)
        router.replicas.drain("b", now=1.0)
        answered = submitted(router, only("b"), now=1.0)
        if wait_s:
            assert answered == [Hold("r")]
            router.replicas.drain("b", False, now=2.0)
            answered = router.handle_timer(now=2.0)
            assert dispatched(answered).replica == "b"
        else:
            message = "none of the 1 replicas in the gateway's subset can take the request now"
            assert (rejected(answered).status, rejected(answered).message) == (503, message)


def test_a_stored_response_outside_the_subset_is_refused() -> None:
    router = make_router("a", "b")
    assert dispatched(submitted(router, only("a", "b", pinned_replica="a"), now=1.0)).replica == "a"
    assert rejected(submitted(router, only("b", request_id="s", pinned_replica="a"), now=1.0)).status == 503
