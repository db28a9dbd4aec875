"""The engine model in wall time: the step loop, and the delivery of its tokens after their trip.

Owns timing. `StepLoop` calls the model at the scheduled ends of its steps; `Deliveries` hands each piece of a response
to its stream when it would have arrived. The streams decide the contents.

Neither drifts: step k + 1 of a busy engine starts at the *scheduled* end of step k, however late the timer was, and a
trip is counted from there. Timers of the event loop have about 1 ms of resolution, so that is the precision of a single
event. Nothing here wakes a task per token: a step writes to all its streams from one callback.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from time import monotonic
from typing import Generic, Protocol

from gorgo.sim.engine.engines import Engine
from gorgo.sim.engine.steps import RequestT, Step
from gorgo.sim.network.links import Path


class Stream(Protocol):
    """Where the pieces of one response arrive."""

    last_arrival_s: float

    def deliver(self, piece: bytes) -> None: ...


class StepLoop(Generic[RequestT]):
    """Drives one engine model by the wall clock.

    Parameters
    ----------
    model:
        The engine.
    emit:
        Called for each request that got a token, with the scheduled end of its step.
    """

    def __init__(self, model: Engine[RequestT], emit: Callable[[RequestT, float], None]) -> None:
        self.model = model
        self._emit = emit
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        #: Lateness of the last step: shows whether this machine keeps up with the simulated engine.
        self.lag_s = 0.0

    def submit(self, request: RequestT, now: float) -> None:
        """Hand over a request that arrived at `now`; an idle engine starts at once."""
        self.model.submit(request, now=now)
        if self._timer is None:
            self._start(now)

    def close(self) -> None:
        """Stop the engine where it is."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start(self, now: float) -> None:
        step = self.model.start_step(now=now)
        if step is None and self.model.next_arrival_s is not None:
            step = self.model.start_step(now=max(now, self.model.next_arrival_s))
        if step is None:
            self._timer = None
        else:
            self._timer = self._loop.call_later(max(0.0, step.ends_s - monotonic()), self._finish, step)

    def _finish(self, step: Step[RequestT]) -> None:
        self.lag_s = monotonic() - step.ends_s
        emit, ended_s = self._emit, step.ends_s
        try:
            for request in self.model.finish_step(step):
                emit(request, ended_s)
        finally:
            self._start(ended_s)


class Deliveries:
    """Pieces of responses on their way back, in order per stream; those due in the same millisecond share a timer.

    A stream whose `last_arrival_s` is infinite hangs: nothing more of it arrives.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._direct = not path.link.rtt_s
        self._loop = asyncio.get_running_loop()
        self._due: dict[int, list[tuple[Stream, bytes]]] = {}
        self._heap: list[int] = []
        self._timer: asyncio.TimerHandle | None = None
        self._armed_ms = 0

    def send(self, stream: Stream, piece: bytes, sent_s: float) -> None:
        """Let `piece`, sent at `sent_s`, arrive after its trip and after all that `stream` was sent before."""
        arrival_s = self._path.arrival_s(sent_s, stream.last_arrival_s)
        if arrival_s == inf:
            return
        stream.last_arrival_s = arrival_s
        if self._direct:
            stream.deliver(piece)
            return
        due_ms = round(arrival_s * 1000)
        waiting = self._due.get(due_ms)
        if waiting is not None:
            waiting.append((stream, piece))
            return
        self._due[due_ms] = [(stream, piece)]
        heappush(self._heap, due_ms)
        self._arm()

    def close(self) -> None:
        """Drop all pieces in transit."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._due.clear()
        self._heap.clear()

    def _arm(self) -> None:
        """Have the one timer at the first millisecond at which something is due."""
        first_ms = self._heap[0]
        if self._timer is not None:
            if self._armed_ms <= first_ms:
                return
            self._timer.cancel()
        self._armed_ms = first_ms
        self._timer = self._loop.call_later(max(0.0, first_ms / 1000 - monotonic()), self._arrive)

    def _arrive(self) -> None:
        self._timer = None
        now_ms = round(monotonic() * 1000)
        while self._heap and self._heap[0] <= max(now_ms, self._armed_ms):
            for stream, piece in self._due.pop(heappop(self._heap)):
                stream.deliver(piece)
        if self._heap:
            self._arm()
