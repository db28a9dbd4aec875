"""One engine on the event heap: requests go in when they arrive, tokens come out at the ends of its steps.

Owns the times of steps. A run of decode iterations is one event; an arrival that could change the next step, an abort,
a change of speed or an observer ends the run at the current iteration. `sim.remote_replica` has the network.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from gorgo.core.messages.request import Outcome
from gorgo.core.record import record
from gorgo.lab.sim.engine.engines import Engine
from gorgo.lab.sim.engine.itl import DecodeTimeline
from gorgo.lab.sim.engine.request import EngineRequest, Step
from gorgo.lab.sim.event_queue import EventQueue
from gorgo.lab.sim.network import ConnectionPool, Link, PooledSimConnection, TripDelays


class AttemptEvents(Protocol):
    """Receiver of the events of attempts."""

    def on_first_token(self, sending: SimAttempt) -> None: ...

    def on_stalled(self, sending: SimAttempt) -> bool:
        """Ask another replica for the rest of its answer; return whether one was asked."""
        ...

    def on_end(self, sending: SimAttempt, outcome: Outcome) -> None: ...


class SendingPort(Protocol):
    """The way of one router to one replica."""

    @property
    def shell(self) -> AttemptEvents: ...

    @property
    def link(self) -> Link: ...

    @property
    def pool(self) -> ConnectionPool: ...

    #: Attempts that have not ended.
    open_attempts: int


@record
class AnswerSoFar:
    """What the client has of an answer that broke off, of all attempts so far.

    `gaps` are those between its tokens, as (s, how often), the ones at its seams included; `last_s` is when the last
    token came.
    """

    tokens: int
    gaps: tuple[tuple[float, int], ...]
    last_s: float


class SimAttempt(EngineRequest):
    """One attempt: a request on its way to an engine, in it, and its answer on the way back.

    `before` is the part of an answer that it goes on with: its prompt ends with that, and its output is the rest.
    """

    __slots__ = (
        "arrives_s",
        "attempt_id",
        "before",
        "body_bytes",
        "done",
        "earlier_gaps",
        "first_token_arrival_s",
        "has_first_token",
        "mark",
        "paused_s",
        "pooled",
        "port",
        "rank",
        "request_id",
        "resumed_s",
        "so_far",
        "trips",
    )

    def __init__(
        self,
        request_id: str,
        attempt_id: str,
        key: bytes,
        *,
        prompt_tokens: int,
        output_tokens: int,
        body_bytes: int,
        trips: TripDelays,
        output_key: bytes = b"",
        before: AnswerSoFar | None = None,
    ) -> None:
        super().__init__(key, prompt_tokens=prompt_tokens, output_tokens=output_tokens, output_key=output_key)
        self.request_id = request_id
        self.attempt_id = attempt_id
        self.body_bytes = body_bytes
        self.trips = trips
        self.before = before
        #: What the client has when the attempt has broken off after its first token.
        self.so_far: AnswerSoFar | None = None
        #: The engine of the replica that has it.
        self.rank = 0
        self.pooled: PooledSimConnection | None = None
        #: By which it is sent.
        self.port: SendingPort
        self.arrives_s = 0.0
        #: When its first token reaches the proxy, and whether it has.
        self.first_token_arrival_s: float | None = None
        self.has_first_token = False
        #: Its end was reported, or it was aborted.
        self.done = False
        #: Where the engine's log of decode iterations stood at its first token.
        self.mark = 0
        #: Of a preempted request: when it got the token before and the one after, and its gaps until then.
        self.paused_s: float | None = None
        self.resumed_s: float | None = None
        self.earlier_gaps: list[tuple[float, int]] = []


#: Called with a request at its first and last token, and the time.
OnToken = Callable[[SimAttempt, float], None]


class EngineDriver:
    """Drives one engine model in virtual time.

    Parameters
    ----------
    kernel:
        The heap.
    model:
        The engine.
    first_token, finished:
        Called at the end of the step that brought the token; the former comes first where they are one.
    ahead:
        Whether decode iterations are run at once. Without it each is an event, for comparison.
    """

    def __init__(
        self,
        kernel: EventQueue,
        model: Engine[SimAttempt],
        *,
        first_token: OnToken,
        finished: OnToken,
        ahead: bool = True,
    ) -> None:
        self._kernel = kernel
        self._model = model
        self._first_token = first_token
        self._finished = finished
        self._ahead = ahead
        self._step: Step[SimAttempt] | None = None
        self.log = DecodeTimeline()

    @property
    def model(self) -> Engine[SimAttempt]:
        """The engine as it is now."""
        self._settle()
        return self._model

    def submit(self, request: SimAttempt) -> None:
        """A request arrives; raises `BadRequest` if it can never run."""
        now = self._kernel.now
        # Behind a request that could not be admitted when the run began, this one changes nothing.
        blocked = self._model.queued
        self._model.submit(request, now=now)
        if self._step is None:
            self._start(now)
        elif not blocked:
            self._settle()

    def abort(self, request: SimAttempt) -> None:
        """Abort a request whose client disconnected."""
        self.model.abort(request)

    def set_slowdown(self, factor: float) -> None:
        """Steps that start from now on take so many times as long."""
        self.model.slowdown = factor

    def stop(self) -> None:
        """Kill the engine: the current step never ends."""
        self._step = None

    def gaps(self, request: SimAttempt) -> list[tuple[float, int]]:
        """Times between the tokens that a request has had from this engine, as long as nothing has happened since."""
        if request.paused_s is not None:
            return request.earlier_gaps
        since_s = request.first_token_s if request.resumed_s is None else request.resumed_s
        assert since_s is not None, "what has finished has begun"
        return [*request.earlier_gaps, *self.log.gaps(request.mark, first_token_s=since_s)]

    def _settle(self) -> None:
        """Leave a run of iterations at the one under way."""
        ended, left = self._model.split_run(now=self._kernel.now)
        if left is None:
            return
        assert self._step is not None, "a run is a step"
        if ended:
            self.log.add(self._step.started_s, left.started_s, ended)
        self._await(left)

    def _start(self, now: float) -> None:
        step = self._model.start_step(now=now, ahead=self._ahead)
        if step is None:
            self._step = None
        else:
            for request in step.preempted:
                self._pause(request, now)
            self._await(step)

    def _pause(self, request: SimAttempt, now: float) -> None:
        """Close the gaps of a request that is preempted while it decodes; it had a token from the step before."""
        if request.emitted and request.paused_s is None:
            request.earlier_gaps = self.gaps(request)
            request.paused_s = now

    def _resume(self, request: SimAttempt, now: float) -> None:
        assert request.paused_s is not None, "what resumes was preempted"
        request.earlier_gaps.append((now - request.paused_s, 1))
        request.mark, request.resumed_s, request.paused_s = self.log.mark(), now, None

    def _await(self, step: Step[SimAttempt]) -> None:
        self._step = step
        self._kernel.at(step.ends_s, partial(self._end, step))

    def _end(self, step: Step[SimAttempt]) -> None:
        if step is not self._step:
            return  # The run was split, or the engine is dead.
        if not step.chunks or 0 in step.chunks:
            self.log.add(step.started_s, step.ends_s, step.iterations)
        for request in self._model.finish_step(step):
            if step.chunks and request.emitted == 1:
                request.mark = self.log.mark()
                self._first_token(request, step.ends_s)
            elif request.paused_s is not None:
                self._resume(request, step.ends_s)
            if request.emitted == request.output_tokens:
                self._finished(request, step.ends_s)
        if self.log.is_long:
            self.log.forget(request.mark for request in self._model.batch.decoding)
        self._start(step.ends_s)
