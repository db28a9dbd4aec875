"""Timers of queued requests: order, requests that left, timers that moved, and the bound on the heap."""

from __future__ import annotations

from math import inf

from gorgo.core.admission.queue import FairQueue, QueuedRequest
from gorgo.core.admission.shed_timers import ShedTimers
from gorgo.core.dispatch.in_flight import RequestState
from tests.core.routers import a_request


def enqueue(queue: FairQueue, timers: ShedTimers, request_id: str, shed_at_s: float) -> QueuedRequest:
    queued = QueuedRequest(RequestState(a_request(request_id)), 1.0, enqueued_s=0.0, shed_at_s=shed_at_s)
    queue.add(queued)
    timers.arm(queued)
    return queued


def test_requests_are_due_in_the_order_of_their_times_and_once() -> None:
    queue = FairQueue()
    timers = ShedTimers(queue)
    for request_id, shed_at_s in (("b", 2.0), ("a", 1.0), ("never", inf), ("c", 3.0)):
        enqueue(queue, timers, request_id, shed_at_s)
    assert timers.next_s() == 1.0
    assert [queued.request_id for queued in timers.due(now=2.0)] == ["a", "b"]
    assert timers.next_s() == 3.0
    assert list(timers.due(now=2.9)) == []


def test_request_that_left_the_queue_is_skipped() -> None:
    queue = FairQueue()
    timers = ShedTimers(queue)
    first = enqueue(queue, timers, "a", 1.0)
    enqueue(queue, timers, "b", 2.0)
    queue.remove(first)
    assert timers.next_s() == 2.0
    assert [queued.request_id for queued in timers.due(now=5.0)] == ["b"]


def test_timer_that_is_moved_later_is_not_due_at_its_old_time() -> None:
    queue = FairQueue()
    timers = ShedTimers(queue)
    queued = enqueue(queue, timers, "a", 1.0)
    timers.reset(queued, 4.0)
    assert list(timers.due(now=3.0)) == []
    assert [one.request_id for one in timers.due(now=4.0)] == ["a"]


def test_moving_a_timer_often_does_not_fill_memory() -> None:
    queue = FairQueue()
    timers = ShedTimers(queue)
    queued = enqueue(queue, timers, "a", 1.0)
    for step in range(1000):
        timers.reset(queued, 2.0 + step)
    assert len(timers) <= 4 * len(queue) + 64
    assert {one.request_id for one in timers.due(now=2000.0)} == {"a"}
