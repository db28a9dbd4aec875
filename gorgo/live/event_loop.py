"""What ties the Router and the connections to the event loop: its events and timer, the clock, the writes of a turn.

Owns the exchange of each open request, to which each action goes, and the Router's timer (`RouterGateway`); the one
clock (`epoch_clock`); and when the bytes of a busy loop are written (`TurnWrites`).

Theory of operation. An event of one request can cause actions for others: an end frees a slot for a queued request,
time makes another one late. The action for the request itself is returned. The others are delivered in the same step,
so that no other event comes between a decision and its delivery. After each event the timer is set to the Router's next
one, if that is sooner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from itertools import count
from math import inf
from time import monotonic, time
from typing import Protocol
from weakref import WeakKeyDictionary

from gorgo.core.messages.actions import Action, AdmissionAction, Continue, Dispatch, FleetEvent, Hedge, RetryAction
from gorgo.core.messages.request import COMPLETED, AttemptResult, Outcome, RouteRequest
from gorgo.core.router import Router

# The proxy's one clock: monotonic seconds, anchored to the epoch at start.
#
# Differences stay right after a step of the system's clock. What is shown as a date (logs, samples, traces, the history
# of weights) reads the system's clock anew: a machine that starts before its clock is set would show the wrong day for
# as long as the process runs.


Clock = Callable[[], float]


class EpochClock:
    """A clock: s since the epoch as the system knew it at start.

    Parameters
    ----------
    wall, steady:
        The system's clock, which may be set, and its monotonic one, s.

    Example
    -------
    >>> clock = EpochClock(wall=iter([1000.0, 4605.0]).__next__, steady=iter([1.0, 6.0, 6.0]).__next__)
    >>> clock.now(), clock.ahead_s()
    (1005.0, 3600.0)
    """

    __slots__ = ("_offset_s", "_steady", "_wall")

    def __init__(self, wall: Callable[[], float] = time, steady: Callable[[], float] = monotonic) -> None:
        self._wall, self._steady = wall, steady
        self._offset_s = wall() - steady()

    def now(self) -> float:
        """Return the time. A request asks ten times: a call of a method, and not of the object, which takes longer."""
        return self._steady() + self._offset_s

    def ahead_s(self) -> float:
        """Return how far the system's clock is ahead now: about 0 unless it was set since the start."""
        return self._wall() - self.now()


def epoch_clock() -> Clock:
    """Return a clock: s since the epoch as the system knew it at start."""
    return EpochClock().now


def ahead_s(clock: Clock) -> float:
    """Return what to add to a time of `clock` that is shown as a date: the steps of the system's clock since the start.

    0 for a clock that is not the system's.
    """
    owner = getattr(clock, "__self__", None)
    return owner.ahead_s() if isinstance(owner, EpochClock) else 0.0


async def first_of(*events: asyncio.Event) -> None:
    """Wait until one of the events is set."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waiting:
            each.cancel()


class ActionSink(Protocol):
    """An open exchange."""

    def deliver(self, action: Action) -> None:
        """Act on `action` now. May finish attempts, and may not wait."""
        ...


class Stale(Protocol):
    """What the Router knows of one replica's connections, no longer true."""

    def refresh(self) -> None:
        """Report the present state."""
        ...


class RouterGateway:
    """The Router as exchanges use it.

    Parameters
    ----------
    router, clock:
        Of the running proxy.
    on_fleet_event:
        Called with each change of the fleet that the Router reports.
    """

    __slots__ = (
        *("_clock", "_due_s", "_numbers", "_on_fleet_event", "_open", "_router", "_timer", "on_dispatch"),
        *("after_event", "before_decision", "stale_connections"),
    )

    def __init__(self, router: Router, clock: Clock, on_fleet_event: Callable[[FleetEvent], None]) -> None:
        self._router = router
        self._clock = clock
        self._on_fleet_event = on_fleet_event
        #: Called with each dispatch, hedges included, after its reservation.
        self.on_dispatch: list[Callable[[Dispatch], None]] = []
        #: Takes in what other workers have reported; `None` for a router of one process.
        self.before_decision: Callable[[], None] | None = None
        #: Called after each event of a request; `None` likewise.
        self.after_event: Callable[[], None] | None = None
        #: Whose next connections have changed. They are reported before an event that may dispatch: of the two changes
        #: of a request most decisions read neither.
        self.stale_connections: list[Stale] = []
        self._open: dict[str, ActionSink] = {}
        self._numbers = count(2)
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = float("inf")

    def register(self, request_id: str, exchange: ActionSink) -> str:
        """Return the id of the request in the Router: unique, though a client may use one id twice at a time."""
        if request_id in self._open:
            # A number, and not a longer id at each try: a client may use one id for all that it has open.
            request_id = next(free for number in self._numbers if (free := f"{request_id}+{number}") not in self._open)
        self._open[request_id] = exchange
        return request_id

    def unregister(self, request_id: str) -> None:
        del self._open[request_id]

    def submit(self, request: RouteRequest) -> AdmissionAction:
        """Submit a request; return the action for it."""
        if self.stale_connections:
            self.refresh_connections()
        if self.before_decision is not None:
            self.before_decision()
        action, others = self._router.submit(request, now=self._clock())
        self.apply(others)
        self._report_dispatch(action)
        return action

    def abandon(self, request_id: str) -> None:
        """Cancel a queued request."""
        self.apply(self._router.abandon(request_id, now=self._clock()))

    def first_token(self, attempt_id: str, *, now: float) -> None:
        if self.stale_connections and self._router.queued:
            self.refresh_connections()
        self.apply(self._router.on_first_token(attempt_id, now=now))

    def released(self, dispatch: Dispatch) -> None:
        """Release the load of an attempt that has ended, before `finish` has its outcome."""
        if self.stale_connections and self._router.queued:
            self.refresh_connections()
        self.apply(self._router.on_released(dispatch.attempt_id, now=self._clock()))

    def finish(self, dispatch: Dispatch, outcome: Outcome) -> RetryAction | None:
        """Finish an attempt; return the next action for its request: a Dispatch, a Reject, or None."""
        if self.stale_connections and (self._router.queued or outcome.result is not COMPLETED):
            self.refresh_connections()
        action, others = self._router.on_finish(dispatch.attempt_id, outcome, now=self._clock())
        self.apply(others)
        self._report_dispatch(action)
        return action

    def continue_beside(self, dispatch: Dispatch, replicas: frozenset[str], partial_tokens: int) -> Dispatch | None:
        """Dispatch the rest of an answer while its attempt stays open; `None` if it stays there."""
        if self.stale_connections:
            self.refresh_connections()
        action = self._router.continue_beside(dispatch.attempt_id, replicas, partial_tokens, now=self._clock())
        self._report_dispatch(action)
        if self.after_event is not None:
            self.after_event()
        return None if action is None else action.dispatch

    def resumed(self, dispatch: Dispatch) -> None:
        """Leave an answer to the attempt that had it, and cancel the one beside it."""
        self.apply(self._router.on_resumed(dispatch.attempt_id, now=self._clock()))

    def served_elsewhere(self, dispatch: Dispatch, replica: str, outcome: Outcome) -> Dispatch | None:
        """Move an attempt, which ended so, to the replica that a gateway chose; `None` if there is nothing to move."""
        now = self._clock()
        action, others = self._router.on_served_elsewhere(dispatch.attempt_id, replica, outcome, now=now)
        self.apply(others)
        self._report_dispatch(action)
        return action

    def run_timer(self) -> None:
        """Run the Router's due timers."""
        self._set_timer(None, float("inf"))
        self.refresh_connections()
        self.apply(self._router.handle_timer(now=self._clock()))

    def close(self) -> None:
        """Cancel the timer."""
        self._set_timer(None, float("-inf"))

    def apply(self, actions: Iterable[Action]) -> None:
        """Deliver actions to their exchanges and events of the fleet to the observer; set the timer."""
        for action in actions:
            self._report_dispatch(action)
            exchange = self._open.get(action.request_id)
            if exchange is not None:
                exchange.deliver(action)
            elif isinstance(action, Dispatch | Hedge):
                # The exchange has ended: release the reservation.
                sent = action if isinstance(action, Dispatch) else action.dispatch
                self.finish(sent, Outcome(AttemptResult.CLIENT_DISCONNECTED))
        while self._router.fleet_events:
            self._on_fleet_event(self._router.fleet_events.popleft())
        due_s = self._router.next_timer()
        if due_s is not None and due_s < self._due_s:
            wait_s = max(0.0, due_s - self._clock())
            self._set_timer(asyncio.get_running_loop().call_later(wait_s, self.run_timer), due_s)
        if self.after_event is not None:
            self.after_event()

    def refresh_connections(self) -> None:
        """Report the connections that have changed."""
        stale, self.stale_connections[:] = [*self.stale_connections], []
        for each in stale:
            each.refresh()

    def _report_dispatch(self, action: Action | None) -> None:
        if self.on_dispatch and isinstance(action, Dispatch | Hedge | Continue):
            for observe in self.on_dispatch:
                observe(action if isinstance(action, Dispatch) else action.dispatch)

    def _set_timer(self, timer: asyncio.TimerHandle | None, due_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._due_s = timer, due_s


# Coalesces the writes of a busy event loop, to clients and to replicas: those of one turn are done in the next.
#
# Theory of operation. A write to a process that sleeps wakes it, which in a virtual machine takes as long as relaying
# an event. Written as they are made, bytes come more slowly than a peer of many connections takes them, so that each
# write finds it asleep. Queued for the next turn they wake it once, and what it sends back comes together too, so the
# next turn has more to do with the same code, which is then in the processor's caches. A loop that has little to do
# queues nothing: there each write is a turn earlier, and a turn costs more than a wake-up.


#: Writes are counted for so long, s.
WINDOW_S = 0.010
#: From so many in a window the loop is busy. Streams of 50 events/s reach it at 48; then a turn is under a millisecond.
BUSY_WRITES = 24
#: Connections that write together: half a millisecond.
MAX_CONNECTIONS = 64


class HasWaitingBytes(Protocol):
    """A connection with bytes to write."""

    loop: asyncio.AbstractEventLoop

    def write_waiting(self) -> None:
        """Write what waits, unless the connection has ended."""


class TurnWrites:
    """The connections of an event loop whose bytes wait for the next turn."""

    __slots__ = ("_begun_s", "_is_busy", "_waiting", "_writes")

    def __init__(self) -> None:
        self._waiting: list[HasWaitingBytes] = []
        #: Start of the window, its writes so far, and whether the window before it had many.
        self._begun_s = -inf
        self._writes = 0
        self._is_busy = False

    def are_many(self, now: float) -> bool:
        """Count a write at the loop's time; return whether it waits for the others of its turn."""
        passed_s = now - self._begun_s
        if passed_s >= WINDOW_S:
            self._is_busy = self._writes >= BUSY_WRITES and passed_s < 2 * WINDOW_S
            self._begun_s, self._writes = now, 0
        self._writes += 1
        return self._is_busy or self._writes >= BUSY_WRITES

    def add(self, writer: HasWaitingBytes) -> None:
        """Call `writer` in the next turn; once for each call."""
        waiting = self._waiting
        waiting.append(writer)
        if len(waiting) == 1:
            writer.loop.call_soon(self.flush)
        elif len(waiting) == MAX_CONNECTIONS:
            self.flush()

    def flush(self) -> None:
        """Write now."""
        waiting, self._waiting = self._waiting, []
        for writer in waiting:
            writer.write_waiting()


_OF_LOOP: WeakKeyDictionary[asyncio.AbstractEventLoop, TurnWrites] = WeakKeyDictionary()


def writes_of(loop: asyncio.AbstractEventLoop) -> TurnWrites:
    """Return the one that all connections of a loop share."""
    writes = _OF_LOOP.get(loop)
    if writes is None:
        writes = _OF_LOOP[loop] = TurnWrites()
    return writes
