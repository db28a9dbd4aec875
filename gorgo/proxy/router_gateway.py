"""Between exchanges and the Router: events go in, and each action goes to the exchange that it is for.

Owns which exchange has which request, and the timer by which the Router is woken. What an action means for one exchange
is `exchange`'s.

Theory of operation. An event of one request can cause actions for others: an end makes room for one that waits, time
makes another one late. What is for the exchange that tells is answered to it; the rest is delivered there and then, in
the same step, so that no other event comes between a decision and the one it is for. After each event the Router is
asked when it wants to be woken, and a timer is set if that is sooner than the one that is set.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol

from gorgo.core.messages.actions import Action, AdmissionAction, Dispatch, Hedge, RetryAction
from gorgo.core.messages.events import FleetEvent
from gorgo.core.messages.request import AttemptResult, Outcome, RouteRequest
from gorgo.core.router import Router
from gorgo.proxy.clock import Clock


class ActionSink(Protocol):
    """One open exchange."""

    def deliver(self, action: Action) -> None:
        """Do this now; may tell the desk of ends, and may not wait."""
        ...


class RouterGateway:
    """The Router as exchanges use it.

    Parameters
    ----------
    router, clock:
        The proxy's.
    on_fleet_event:
        Called with each change of the fleet that the Router reports.
    """

    __slots__ = ("_clock", "_due_s", "_on_fleet_event", "_open", "_router", "_timer")

    def __init__(self, router: Router, clock: Clock, on_fleet_event: Callable[[FleetEvent], None]) -> None:
        self._router = router
        self._clock = clock
        self._on_fleet_event = on_fleet_event
        self._open: dict[str, ActionSink] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = float("inf")

    def register(self, request_id: str, exchange: ActionSink) -> str:
        """Answers the id by which the Router is to know the request: a client may use one twice at a time."""
        while request_id in self._open:
            request_id += "+"
        self._open[request_id] = exchange
        return request_id

    def unregister(self, request_id: str) -> None:
        del self._open[request_id]

    def submit(self, request: RouteRequest) -> AdmissionAction:
        """What becomes of it."""
        own, others = self._router.submit(request, now=self._clock())
        self._deliver(others)
        return own

    def abandon(self, request_id: str) -> None:
        """It waited, and nobody waits for it any more."""
        self._deliver(self._router.abandon(request_id, now=self._clock()))

    def first_token(self, attempt_id: str, *, now: float) -> None:
        self._deliver(self._router.on_first_token(attempt_id, now=now))

    def finish(self, dispatch: Dispatch, outcome: Outcome) -> RetryAction | None:
        """What its request wants next: another Dispatch, a Reject, or nothing."""
        own, others = self._router.on_finish(dispatch.attempt_id, outcome, now=self._clock())
        self._deliver(others)
        return own

    def run_timer(self) -> None:
        """Tell the Router the time."""
        self._set(None, float("inf"))
        self._deliver(self._router.handle_timer(now=self._clock()))

    def apply(self, actions: Iterable[Action]) -> None:
        """What a probe or another event outside of exchanges has caused."""
        self._deliver(actions)

    def close(self) -> None:
        """No more timers."""
        self._set(None, float("-inf"))

    def _deliver(self, actions: Iterable[Action]) -> None:
        for action in actions:
            addressee = self._open.get(action.request_id)
            if addressee is not None:
                addressee.deliver(action)
            elif isinstance(action, Dispatch | Hedge):
                # Nobody is there any more, and what was reserved has to be given back.
                sent = action if isinstance(action, Dispatch) else action.dispatch
                self.finish(sent, Outcome(AttemptResult.CLIENT_DISCONNECTED))
        while self._router.fleet_events:
            self._on_fleet_event(self._router.fleet_events.popleft())
        due_s = self._router.next_timer()
        if due_s is not None and due_s < self._due_s:
            wait_s = max(0.0, due_s - self._clock())
            self._set(asyncio.get_running_loop().call_later(wait_s, self.run_timer), due_s)

    def _set(self, timer: asyncio.TimerHandle | None, due_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._due_s = timer, due_s
