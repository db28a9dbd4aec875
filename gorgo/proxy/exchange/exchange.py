"""One request in progress: what belongs to it, its wait in the queue, and its attempts until a response is complete.

Owns what is sent to a replica, and the result of its response, failure or silence. Guarantees that each dispatch of the
Router is finished exactly once. Leaves the order of a request's steps to `gorgo.proxy.server`, the bytes of a response
to `gorgo.proxy.exchange.relay`, what the proxy itself says to the client to `ClientResponse`, what is kept of an answer
to `RetainedAnswer`, and the next attempt to the Router.

Theory of operation: each attempt has one `finally`. Until a result is known, its outcome is a disconnected client: the
meaning of a cancellation at any point. An attempt claims the response before anything is sent to the client. From then
on no other attempt is made, so the request's body is dropped: a stream may take minutes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import field, replace
from functools import partial
from time import monotonic
from typing import Any

from gorgo.core.continuation import (
    ROUTES,
    Seam,
    continued_body,
    last_event,
    missing_counts,
    shows_usage,
    with_default_bound,
)
from gorgo.core.messages.actions import Action, Cancel, Continue, Dispatch, Forward, Hedge, Reject
from gorgo.core.messages.request import AttemptResult, Outcome
from gorgo.core.record import mutable_record
from gorgo.engines.base import continuation_of
from gorgo.live.event_loop import ahead_s
from gorgo.live.http.body import RequestBuffer, ResettableTimeout, buffer_client
from gorgo.live.http.errors import HttpError, Message, Receive, Send
from gorgo.live.http.headers import Header, headers_for_replica, request_id_of
from gorgo.live.logs import log_failure
from gorgo.live.request.parse import ParsedRequest, engine_text, failure_of, follow_model
from gorgo.live.request.record import RequestRecord
from gorgo.live.state import LiveState
from gorgo.live.upstream.client import CONNECTION_LOST, POOL_EXHAUSTED, UpstreamError
from gorgo.live.upstream.target import MOVED, Target
from gorgo.proxy.exchange.answer import BrokenAnswer, RetainedAnswer, as_read
from gorgo.proxy.exchange.passage import Passage, Refusal
from gorgo.proxy.exchange.relay import CutEndError, relay, relay_rest, retain_failure
from gorgo.proxy.exchange.response import ClientResponse, direct_write, own_headers

#: Answers of a replica in a row that break off behind their finish reason: from so many on its engine is taken to end
#: so, and no other replica is asked for the counts. A prefill for each answer would be a high price.
MOST_CUT_ENDS = 3
#: The comment in the place of counts that a client asked for and no replica has said.
LACKS_COUNTS = b": x-gorgo-usage-missing\n\n"
#: How an attempt ends as long as nothing else is known.
_DISCONNECTED = Outcome(AttemptResult.CLIENT_DISCONNECTED)
#: A larger request is not sent again for the rest of its answer: it would be parsed within the event loop, 10 ms a MB.
MAX_CONTINUED_BODY = 1024 * 1024

# What passes between a request and its attempts: leases, the wait of a queued request, the race of two attempts.
#
# A decision is not lost if the client disconnects between the event that decides and the task that waits. Of the open
# attempts, at most two, the client is sent one. The first attempt runs in the task of its exchange, so that a request
# without a hedge pays nothing. A hedge has a task of its own. Before anything is sent to the client an attempt claims
# it, in one step that also cancels the other's task. A cancelled task runs no further line of its own, so two attempts
# never write. A task that has not begun is not cancelled: it would then never begin, nor release its reservation. Its
# first act is to check that it is open.


@mutable_record
class Lease:
    """A dispatch, and the replica's process at that moment, in use until the end of the attempt.

    Made in the step of the dispatch: a reload may replace the process afterwards.
    """

    dispatch: Dispatch
    target: Target
    #: The metrics have the attempt.
    counted: bool = False
    #: Its answer, while the attempt runs.
    passage: Passage | None = None
    #: The answer that it goes on with.
    rest: BrokenAnswer | None = None


#: The next step of a request.
NextStep = Lease | Reject | Forward


class PendingDispatch:
    """One wait, which began at `enqueued_s`."""

    __slots__ = ("_resolved", "enqueued_s")

    def __init__(self, enqueued_s: float) -> None:
        self.enqueued_s = enqueued_s
        self._resolved: asyncio.Future[NextStep] = asyncio.get_running_loop().create_future()

    async def wait(self) -> NextStep:
        return await self._resolved

    def resolve(self, step: NextStep) -> bool:
        """End the wait. Return False if it was cancelled."""
        if self._resolved.done():
            return False
        self._resolved.set_result(step)
        return True

    def unclaimed(self) -> NextStep | None:
        """Return the step that a cancelled wait did not take; None if it was not resolved."""
        return self._resolved.result() if self._resolved.done() and not self._resolved.cancelled() else None


_SecondTask = asyncio.Task[NextStep | None]


@mutable_record
class Race:
    """Attempts by id."""

    #: Open attempts and their tasks; None for one that has yet to begin.
    _tasks: dict[str, asyncio.Task[Any] | None] = field(default_factory=dict)
    #: The attempt that the client is sent, once known.
    winner: str | None = None
    #: Tasks of second attempts, until they have been joined: a hedge, and each continuation that was opened beside a
    #: stream.
    seconds: list[_SecondTask] = field(default_factory=list)

    def __contains__(self, attempt_id: object) -> bool:
        """Whether the attempt is open and not stopped."""
        return attempt_id in self._tasks

    def track(self, attempt_id: str, task: asyncio.Task[Any]) -> None:
        """Record that the attempt runs in `task`."""
        self._tasks[attempt_id] = task

    def done(self, attempt_id: str) -> None:
        """Record the end of an attempt."""
        self._tasks.pop(attempt_id, None)

    def start_second(self, attempt_id: str, run: Coroutine[object, object, NextStep | None]) -> None:
        """Start a second attempt in a task of its own, which begins after this step."""
        self._tasks[attempt_id] = None
        self.seconds.append(asyncio.create_task(run))

    def claim(self, attempt_id: str) -> None:
        """Make this attempt the winner, and stop the other."""
        assert self.winner in (None, attempt_id), "two attempts claim the response"
        self.winner = attempt_id
        for other in [*self._tasks]:
            if other != attempt_id:
                self._stop(other)

    def cancel(self, attempt_id: str) -> None:
        """Stop an attempt because another is the winner."""
        if attempt_id in self._tasks and attempt_id != self.winner:
            self._stop(attempt_id)

    async def join(self) -> NextStep | None:
        """Wait for the second attempts; return the next step of the one that has one."""
        step: NextStep | None = None
        while step is None and self.seconds:
            second = await self._wait_for_second()
            step = second.result()
        return step

    async def end(self) -> list[NextStep | BaseException]:
        """Stop all attempts at the end of the request. Return failures of second ones, and next steps, never taken."""
        for attempt_id in list(self._tasks) if self.seconds else ():
            self._stop(attempt_id)
        left: list[NextStep | BaseException] = []
        while self.seconds:
            second = await self._wait_for_second()
            result = None if second.cancelled() else second.exception() or second.result()
            if result is not None:
                left.append(result)
        return left

    async def _wait_for_second(self) -> _SecondTask:
        # Not awaited itself: a cancelled wait would cancel it too.
        await asyncio.wait((self.seconds[0],))
        return self.seconds.pop(0)

    def _stop(self, attempt_id: str) -> None:
        task = self._tasks.pop(attempt_id)
        if task is not None:
            task.cancel()


class Exchange:
    """One request and its response.

    Parameters
    ----------
    state:
        The running proxy.
    route:
        Path of the request.
    scope, receive, send:
        Of the ASGI call.
    task:
        Runs the exchange, and is cancelled when the client disconnects.
    """

    __slots__ = (
        "_answer",
        "_beside",
        "_pending",
        "_race",
        "_refused",
        "_running_at",
        "_task",
        "buffer",
        "client",
        "extensions",
        "headers",
        "id",
        "method",
        "receive",
        "received_s",
        "record",
        "request",
        "response",
        "route",
        "router_id",
        "state",
    )
    #: Set once it is parsed.
    request: ParsedRequest

    def __init__(
        self,
        state: LiveState,
        route: str,
        scope: Message,
        receive: Receive,
        send: Send,
        task: asyncio.Task[Any],
    ) -> None:
        self.state = state
        self.route = route
        self.method: str = scope["method"]
        #: The name of the client's key, where clients need one.
        self.client: str | None = scope.get("gorgo.client")
        #: As the client sent them.
        self.headers: list[Header] = scope["headers"]
        #: What the listener offers beside ASGI: the whole body, and a call when the client disconnects.
        self.extensions: dict[str, Any] = scope.get("extensions") or {}
        self.receive = receive
        self.buffer = RequestBuffer(state.buffers, buffer_client(scope))
        self.received_s = state.routing.clock()
        self.id = request_id_of(self.headers)
        #: The id of the request in the Router; None before and after.
        self.router_id: str | None = None
        self.record = RequestRecord(state.routing, state.telemetry, self.received_s, client=self.client)
        self.response = ClientResponse(state, send, self.id, self.record, route, direct_write(scope))
        if state.telemetry.tracing is not None:
            self.record.trace = state.telemetry.tracing.start(
                self.headers,
                route=route,
                request_id=self.id,
                received_s=self.received_s,
                ahead_s=ahead_s(state.routing.clock),
            )
        self._task = task
        self._race = Race()
        #: The wait of a queued request.
        self._pending: PendingDispatch | None = None
        #: What is retained to go on elsewhere, once the answer has begun, and the attempt at the part that runs.
        self._answer: RetainedAnswer | None = None
        self._running_at: Lease | None = None
        #: The attempt that is asked for the rest of the answer while its own stream is open, until either goes on.
        self._beside: Lease | None = None
        #: The last refusal, which the client has not been sent, and the time that the client may take to read it.
        self._refused: tuple[Lease, Refusal, float] | None = None

    def client_disconnected(self) -> None:
        """Stop the request, unless the client has had its response."""
        if not self.response.writer.finished:
            self.response.disconnected = True
            self._task.cancel()

    # -- decisions of the Router

    def lease(self, dispatch: Dispatch) -> Lease:
        """Put the replica of a dispatch in use. Called in the step of the dispatch."""
        target = self.state.replicas.targets[dispatch.replica]
        target.acquire()
        return Lease(dispatch, target, rest=self._broken)

    def deliver(self, action: Action) -> None:
        """Act on a decision of the Router that an event of another request, or of time, caused. Never waits."""
        pending = self._pending
        match action:
            case Dispatch() if pending is not None:
                lease = self.lease(action)
                if not pending.resolve(lease):
                    self._give_back(lease, AttemptResult.CLIENT_DISCONNECTED)
            case Reject() if pending is not None:
                pending.resolve(action)
            case Hedge():
                self._hedge(action.dispatch)
            case Cancel():
                # Another attempt has claimed the response.
                self._race.cancel(action.attempt_id)
            case _:
                raise AssertionError(f"{type(action).__name__} for a request that is not queued")

    async def wait_in_queue(self, request_id: str) -> NextStep:
        """Wait until an event of another request, or of time, makes the Router decide. Raises `HttpError`: 504."""
        limit_s = self.state.limits.request_timeout_s
        try:
            async with asyncio.timeout(limit_s - (self.state.routing.clock() - self.received_s)):
                return await self._wait(request_id)
        except TimeoutError:
            message = f"no replica could take the request within its timeout of {limit_s:g} s"
            raise HttpError(504, "total_timeout", message) from None

    async def _wait(self, request_id: str) -> NextStep:
        self._pending = pending = PendingDispatch(self.state.routing.clock())
        try:
            return await pending.wait()
        except asyncio.CancelledError:
            step = pending.unclaimed()
            if step is None:
                self.state.routing.gateway.abandon(request_id)
            elif isinstance(step, Lease):
                self._give_back(step, AttemptResult.CLIENT_DISCONNECTED)
            raise
        finally:
            self._pending = None
            self.record.queued_s = self.state.routing.clock() - pending.enqueued_s
            self.state.telemetry.metrics.queued(self.record.queued_s)

    # -- attempts, one after the other or two side by side

    def attempt(self, lease: Lease) -> Coroutine[Any, Any, NextStep | None]:
        """Run an attempt to its end. Return the request's next step, None if there is none of its own.

        With a hedge, and after a break in the answer, that step is to be settled.
        """
        return self._run(lease, self._task)

    async def settle_step(self, step: NextStep | None) -> NextStep | None:
        """Return the next step of a request after one of several attempts, None if it has ended."""
        if step is None and self._race.seconds:
            # This attempt lost, or failed while the other was open: the other decides how the request ends.
            step = await self._race.join()
        if self._broken is not None and not isinstance(step, Lease):
            await self._end_broken()
            return None
        return step

    async def forward(self) -> None:
        """Send the client the last refusal. A client that does not read it is disconnected."""
        assert self._refused is not None, "a replica has refused"
        lease, refusal, limit_s = self._refused
        self._commit(lease)
        try:
            async with asyncio.timeout(limit_s):
                await refusal.send(self.response.writer)
        except TimeoutError:
            self.response.disconnected = True

    @property
    def has_broken(self) -> bool:
        """Whether the answer has broken off."""
        return self._answer is not None and self._answer.broken is not None

    @property
    def has_hedge(self) -> bool:
        """Whether a second attempt was started, and not joined."""
        return bool(self._race.seconds)

    async def stop_hedge(self) -> None:
        """Stop a second attempt at the end of the request."""
        for left in await self._race.end():
            if isinstance(left, BaseException):
                log_failure("internal_error", left, request_id=self.id)
            elif isinstance(left, Lease):
                self._give_back(left, AttemptResult.CLIENT_DISCONNECTED)

    def _hedge(self, dispatch: Dispatch) -> None:
        """Start a second attempt beside the first, in a task of its own, unless the response has begun."""
        race = self._race
        if race.winner is not None or self.response.writer.started or race.seconds:
            self.state.routing.gateway.finish(dispatch, Outcome(AttemptResult.SUPERSEDED))
            return
        self.record.hedged = True
        self.state.telemetry.metrics.hedged(dispatch.replica, dispatch.region)
        race.start_second(dispatch.attempt_id, self._run_hedge(self.lease(dispatch)))

    async def _run_hedge(self, lease: Lease) -> NextStep | None:
        """Run the second attempt, unless it was stopped before its task began."""
        if lease.dispatch.attempt_id in self._race:
            task = asyncio.current_task()
            assert task is not None, "a hedge runs in a task of its own"
            return await self._run(lease, task)
        self._give_back(lease, AttemptResult.SUPERSEDED)
        return None

    def _give_back(self, lease: Lease, result: AttemptResult) -> None:
        """Give back a dispatch of which nothing was sent."""
        lease.target.release()
        self.state.routing.gateway.finish(lease.dispatch, Outcome(result))

    async def _run(self, lease: Lease, task: asyncio.Task[Any]) -> NextStep | None:
        dispatch = lease.dispatch
        outcome = _DISCONNECTED
        try:
            self._race.track(dispatch.attempt_id, task)
            self.record.attempt_started(dispatch)
            outcome = await self._try(lease, task)
            if outcome.status == 404 and outcome.unsent:
                await follow_model(self.state.routing, self.request.route.model, dispatch.replica)
        except asyncio.CancelledError:
            if self.response.disconnected:
                outcome = self._outcome_of_end(lease) or outcome
            if dispatch.attempt_id in self._race or self.response.disconnected:
                raise
            task.uncancel()
            outcome = self._superseded(lease)
        finally:
            # Reservations are released first, so that no failure in the records can keep them.
            self._race.done(dispatch.attempt_id)
            lease.target.release()
            lease.passage = None
            action = self.state.routing.gateway.finish(dispatch, outcome)
            self._count(lease)
            lease.target.check_usage(dispatch, outcome)
            self.record.attempt_ended(dispatch, outcome if self._answer is None else self._answer.of_whole(outcome))
        if isinstance(action, Continue):
            return self._continue(action.dispatch)
        if not isinstance(action, Dispatch):
            return action
        self.state.telemetry.metrics.retried(outcome.result.value)
        return self.lease(action)

    # -- one attempt at its replica

    async def _try(self, lease: Lease, task: asyncio.Task[Any]) -> Outcome:
        target = lease.target
        limits, spent_s = target.deadlines, self.state.routing.clock() - self.received_s
        first_s = limits.first_token_s if self.request.route.streamed else limits.response_s
        timer = ResettableTimeout(first_s, last=monotonic() + limits.request_s - spent_s, task=task)
        relay_attempt = self._relay if lease.rest is None else self._relay_rest
        try:
            with timer:
                return await relay_attempt(lease, timer)
        except CutEndError as cut:
            return await self._end_cut(lease, cut.reason, cut.outcome)
        except UpstreamError as failure:
            if failure.reason in CONNECTION_LOST:
                target.connection_lost.set()
            if failure.cause is not None:
                self.record.cause = target.last_failure = failure.cause
            return await self._upstream_failed(lease, failure.reason, failure.cause)
        except TimeoutError:
            if timer.timed_out:
                return await self._deadline_exceeded(lease)
            writer = self.response.writer
            if writer.sending and lease is not self._beside:
                # The client has not read for as long as a replica may be silent: the response is cut.
                self.response.disconnected = True
                return Outcome(AttemptResult.CLIENT_DISCONNECTED, status=writer.status, error="client_stalled")
            return await self._upstream_failed(lease, "timeout")

    async def _relay(self, lease: Lease, timer: ResettableTimeout) -> Outcome:
        dispatch, target = lease.dispatch, lease.target
        headers = self._headers(lease)
        model = self.request.route.model
        name = None if model is None else self.state.routing.models.engine_name(dispatch.replica, model)
        passage: Passage | None = None

        def on_sent() -> None:
            """Do what the replica does not wait for."""
            nonlocal passage
            self._count(lease)
            passage = self._passage(lease, timer)

        # Not in a variable, which would hold the body for as long as the response takes.
        source = await target.upstream.open(
            self.route,
            headers,
            self.request.body_for(name, with_usage=target.request_usage),
            repeatable=self.request.route.idempotent,
            on_sent=on_sent,
        )
        try:
            failure = failure_of(source.status, source.headers)
            if failure is not None and (source.status < 500 or failure.result is AttemptResult.BUSY):
                return failure
            if passage is None:
                passage = self._passage(lease, timer)
            if failure is None:
                outcome = await relay(passage, source)
            else:
                outcome = await retain_failure(passage, source, failure)
            if passage.refusal is not None and (self._refused is None or self._refused[1].status >= 400):
                # A short answer is not replaced: it is better than another replica's refusal.
                self._refused = lease, passage.refusal, target.deadlines.stream_idle_s
            if outcome.result is AttemptResult.FAILED_AFTER_CONTENT:
                self._count_end()  # by an error event of the engine, which was passed on
            elif target.cut_ends and self.request.route.streamed:
                target.cut_ends = 0
            if passage.failure_body:
                outcome = replace(outcome, text=engine_text(passage.failure_body, self.request.body))
            return outcome
        finally:
            if passage is not None:
                target.streams.pop(passage.stream, None)
            await source.aclose()

    def _headers(self, lease: Lease) -> list[Header]:
        """Return the headers for a replica."""
        headers = headers_for_replica(
            self.headers,
            request_id=self.id,
            api_key=lease.target.api_key,
            passed=self.state.passed_headers,
        )
        trace = self.record.trace
        return headers if trace is None else trace.carry(headers, lease.dispatch.attempt_id)

    def _passage(self, lease: Lease, timer: ResettableTimeout) -> Passage:
        dispatch, target = lease.dispatch, lease.target
        state, request = self.state, self.request
        client = request.route.client
        estimates = state.routing.client_policies.may_see_estimates(client)
        record_stored: Callable[[bytes], None] | None = None
        if self.route == "/v1/responses":
            record_stored = partial(state.replicas.record_stored, dispatch, target, client=client)
        lease.passage = Passage(
            self.response.writer,
            timer,
            self.buffer,
            route=self.route,
            own_headers=own_headers(self.id, dispatch, estimates=estimates),
            chunk_limit_s=target.deadlines.stream_idle_s,
            strip_usage=target.request_usage and request.adds_usage,
            on_content=partial(self._first_content, lease),
            on_commit=partial(self._commit, lease),
            on_head=record_stored,
            on_keep=partial(self._keep, lease) if self._is_continuable(target) else None,
            withhold=dispatch.withhold,
            may_be_short=request.may_be_short,
            passed_headers=state.passed_headers,
        )
        return lease.passage

    def _outcome_of_end(self, lease: Lease) -> Outcome | None:
        """Return the outcome of an answer whose end the client had before it left, or None.

        Clients close at `[DONE]`, which may come before the replica ends the body.
        """
        if lease.passage is None or self.record.ttft_s is None:
            return None
        outcome = lease.passage.outcome_of_end()
        self.response.had_end = outcome is not None
        return outcome

    def _commit(self, lease: Lease) -> None:
        """Claim the response for an attempt, and stop any other one."""
        dispatch, request = lease.dispatch, self.request
        self._race.claim(dispatch.attempt_id)
        self.record.replica = dispatch.replica
        if request.body and (self._answer is None or self._answer.passage is None):
            request.body = b""
            self.buffer.release_body()

    def _first_content(self, lease: Lease) -> None:
        """Record the first token. The relay has claimed the response for it."""
        now = self.state.routing.clock()
        self.state.routing.gateway.first_token(lease.dispatch.attempt_id, now=now)
        self.record.first_content(lease.dispatch, now=now)

    def _count(self, lease: Lease) -> None:
        """Count the attempt in the metrics, once."""
        if not lease.counted:
            lease.counted = True
            dispatch = lease.dispatch
            self.state.telemetry.metrics.dispatched(dispatch.replica, dispatch.region, dispatch.decision)

    async def _upstream_failed(self, lease: Lease, reason: str, cause: str | None = None) -> Outcome:
        """Return the outcome of a failed replica. If the response has begun, end it with an error."""
        if not self.response.writer.started:
            # Without a free connection the replica is busy, not broken.
            result = AttemptResult.BUSY if reason == POOL_EXHAUSTED else AttemptResult.FAILED_BEFORE_CONTENT
            return Outcome(result, error=reason, text=cause)
        rest = lease.rest
        if rest is not None and (rest.seam is None or not rest.seam.begun):
            # The client has nothing of this attempt.
            return Outcome(AttemptResult.FAILED_BEFORE_CONTENT, error=reason)
        whole = None if lease.passage is None else lease.passage.outcome_of_end()
        if whole is not None:
            return await self._end_cut(lease, reason, whole)
        outcome = Outcome(AttemptResult.FAILED_AFTER_CONTENT, status=self.response.writer.status, error=reason)
        # While another replica is asked for the rest, it goes on from where that was.
        broken = self._break_off(reason) if self._beside is None else self._beside.rest
        if broken is None:
            self._count_end()
            await self._end_stream()
            return outcome
        self._retained.broken, self._beside = broken, None
        return replace(outcome, continue_on=broken.replicas, partial_tokens=broken.answer.tokens)

    async def _deadline_exceeded(self, lease: Lease) -> Outcome:
        """Return the outcome of a request that reached its timeout, earlier attempts and waits included."""
        if not self.response.writer.started or lease is self._beside:
            return Outcome(AttemptResult.DEADLINE_EXCEEDED, error="total_timeout")
        broken = self._broken
        if broken is not None and broken.answer.finished:
            await self._end_broken()
            return Outcome(AttemptResult.DEADLINE_EXCEEDED, error="total_timeout")
        await self.response.end_stream(504, "total_timeout", "the request timeout ended the response")
        return Outcome(AttemptResult.DEADLINE_EXCEEDED, status=self.response.writer.status, error="total_timeout")

    # -- an answer that breaks off, and goes on at another replica

    def _is_continuable(self, target: Target) -> bool:
        return (
            self.route in ROUTES
            and self.request.route.streamed
            and continuation_of(target.dialect, self.route) is not None
            and self.state.config.limits.continuations > 0
            and len(self.request.body) <= MAX_CONTINUED_BODY
        )

    def _keep(self, lease: Lease, passage: Passage) -> None:
        """Retain the answer from its first token on, if there is memory."""
        self._answer = answer = RetainedAnswer(self.state, self.route, self.request, self.buffer)
        if answer.reserve_for(passage):
            passage.keep(self, lease.target.streams)
            self._track(answer, lease, passage)

    def _track(self, answer: RetainedAnswer, lease: Lease, passage: Passage) -> None:
        answer.running, self._running_at = passage, lease
        lease.target.streams[passage.stream] = None

    @property
    def _broken(self) -> BrokenAnswer | None:
        """The answer, once it has broken off."""
        return None if self._answer is None else self._answer.broken

    def _break_off(self, reason: str) -> BrokenAnswer | None:
        """Return the answer so far, if another replica can go on with it."""
        return None if self._answer is None else self._answer.break_off(reason)

    def _why_not(self) -> str:
        """Return why the answer cannot be read, as the metrics have it."""
        return "request" if self._answer is None else self._answer.why_not()

    @property
    def _retained(self) -> RetainedAnswer:
        assert self._answer is not None, "the answer is retained"
        return self._answer

    def retain(self, answer_bytes: int) -> bool:
        """Reserve memory for so much of the part of the answer that runs; False if refused."""
        return self._answer is not None and self._answer.reserve(answer_bytes)

    def drop(self) -> None:
        """Give that memory up."""
        if self._answer is not None:
            self._answer.drop()

    def release_answer(self) -> None:
        """Forget the answer at the end of the exchange."""
        if self._answer is not None:
            self._answer.release()
            self._answer = self._running_at = self._beside = None

    # -- an answer that is asked for elsewhere while its stream is open

    def continue_beside(self, reason: str) -> bool:
        """Ask another replica for the rest; return whether one was asked. An answer that never can is given up."""
        lease, answer = self._running_at, self._retained
        router, now = self.state.routing.router, self.state.routing.clock()
        assert lease is not None, "the answer is retained"
        if self._beside is not None or not router.can_continue(lease.dispatch.attempt_id, answer.replicas(), now=now):
            return False
        broken = answer.break_off(reason)
        if broken is None:
            answer.drop(answer.why_not())
            return False
        gateway = self.state.routing.gateway
        dispatch = gateway.continue_beside(lease.dispatch, broken.replicas, broken.answer.tokens)
        if dispatch is None:
            return False
        # The engine's count of the rest's prompt is no check of the proxy's.
        self.request.exact = None
        self._beside = beside = self.lease(dispatch)
        beside.rest = broken
        self._race.winner = None
        self._race.start_second(dispatch.attempt_id, self._run_beside(beside))
        return True

    async def _run_beside(self, lease: Lease) -> NextStep | None:
        """Run the attempt at the rest. If it fails before it begins, the stream goes on."""
        try:
            return await self._run_hedge(lease)
        finally:
            at, running = self._running_at, None if self._answer is None else self._answer.running
            is_open = at is not None and at.dispatch.attempt_id in self._race
            if lease is self._beside and running is not None and is_open:
                await running.stream.resume()

    def resume(self) -> None:
        """Leave the answer to its own stream, and cancel the attempt beside it."""
        lease, beside, self._beside = self._running_at, self._beside, None
        assert lease is not None, "the answer is retained"
        if beside is None:
            return
        self.record.withdrawn += beside.dispatch.attempt_id in self._race
        self._race.claim(lease.dispatch.attempt_id)
        self.state.routing.gateway.resumed(lease.dispatch)

    def _superseded(self, lease: Lease) -> Outcome:
        """Return the outcome of an attempt that lost its race."""
        went_on, rest = self._broken, lease.rest
        had_answer = rest is None or (rest.seam is not None and rest.seam.begun)
        if went_on is None or not had_answer:
            return Outcome(AttemptResult.SUPERSEDED)
        failed = went_on.reason != MOVED  # by an operator; the replica has not failed
        result = AttemptResult.FAILED_AFTER_CONTENT if failed else AttemptResult.SUPERSEDED
        return Outcome(result, status=self.response.writer.status, error=went_on.reason)

    def _count_end(self) -> None:
        """Count a stream that broke off and is not continued."""
        if self.response.writer.carries_events:
            self.state.telemetry.metrics.not_continued(self._why_not())

    def _continue(self, dispatch: Dispatch) -> Lease:
        """Begin the attempt that goes on with the answer."""
        self._race.winner = None
        self._leave_stream()
        # The engine's count of the rest's prompt is no check of the proxy's.
        self.request.exact = None
        return self.lease(dispatch)

    def _leave_stream(self) -> None:
        self._retained.leave_stream()
        self._running_at = None

    async def _relay_rest(self, lease: Lease, timer: ResettableTimeout) -> Outcome:
        """Ask a replica for the rest of the answer, and relay it behind what the client has."""
        dispatch, target, broken = lease.dispatch, lease.target, lease.rest
        how = continuation_of(target.dialect, self.route)
        assert broken is not None, "there is an answer to continue"
        if how is None or dispatch.replica not in self._retained.replicas(broken.body):
            # Another engine has taken the replica's place since.
            return Outcome(AttemptResult.FAILED_BEFORE_CONTENT, error="not_continued")
        headers = self._headers(lease)
        model = self.request.route.model
        name = None if model is None else self.state.routing.models.engine_name(dispatch.replica, model)
        answer = broken.answer = await as_read(broken.answer, target, headers, name, route=self.route, how=how)
        bounded = with_default_bound(self.route, broken.body, how)
        rest = replace(self.request, body=continued_body(self.route, bounded, answer, how), spans=None)
        path = how.route(self.route)
        broken.seam = seam = Seam(self.route, answer, bounded, show_usage=shows_usage(broken.body), path=path)
        passage = self._passage(lease, timer)
        passage.on_content = partial(self._rest_begins, lease, broken, passage)
        passage.gaps.last_s = broken.last_s
        body = rest.body_for(name, with_usage=target.request_usage)
        source = await target.upstream.open(path, headers, body, on_sent=partial(self._count, lease))
        try:
            outcome = await relay_rest(passage, source, seam, self._seam_note(dispatch))
            if outcome.result is AttemptResult.UPSTREAM_4XX:
                # The request is the proxy's: a shorter context or an older engine may refuse what others take.
                target.cut_ends += answer.finished
                return replace(outcome, continue_on=broken.replicas, partial_tokens=answer.tokens)
            return outcome
        finally:
            broken.last_s = passage.gaps.last_s
            target.streams.pop(passage.stream, None)
            await source.aclose()

    def _rest_begins(self, lease: Lease, broken: BrokenAnswer, passage: Passage) -> None:
        """Record the first event of the rest of the answer."""
        answer = self._retained
        if lease is self._beside:
            answer.broken, self._beside = broken, None
            self._leave_stream()
        self._race.claim(lease.dispatch.attempt_id)
        self.state.routing.gateway.first_token(lease.dispatch.attempt_id, now=self.state.routing.clock())
        self.record.continued += 1
        self.state.telemetry.metrics.continued(broken.reason, monotonic() - broken.last_s)
        if answer.passage is not None:
            self._track(answer, lease, passage)
            passage.stream.follow(self, lease.target.streams)

    async def _end_cut(self, lease: Lease, reason: str, outcome: Outcome) -> Outcome:
        """End an answer whose stream broke off behind its finish reason, or leave its counts to another replica.

        Its own replica has answered, and is not blamed.
        """
        target, passage = lease.target, lease.passage
        assert passage is not None, "the stream has begun"
        target.cut_ends += 1
        broken = self._break_off(reason)
        if broken is None:
            shows_counts = self._answer is not None and self._answer.shows_usage
            counts = None if outcome.output_tokens is None and shows_counts else b""
        else:
            counts = missing_counts(self.route, broken.body, broken.answer)
        if broken is not None and counts is None and target.cut_ends <= MOST_CUT_ENDS:
            self._retained.broken = broken
            return replace(outcome, continue_on=broken.replicas, partial_tokens=broken.answer.tokens)
        await passage.end_cut(self._said(counts))
        return outcome

    def _said(self, counts: bytes | None) -> bytes:
        """Return the counts, or the comment in their place."""
        self.record.lacks_counts = counts is None
        return LACKS_COUNTS if counts is None else counts

    async def _end_broken(self) -> None:
        """End an answer that no replica goes on with."""
        broken = self._broken
        if self.response.writer.finished or self.response.disconnected:
            return
        if broken is not None and broken.answer.finished:
            counts = self._said(missing_counts(self.route, broken.body, broken.answer))
            await self.response.writer.finish(counts + last_event(self.route))
            return
        self.state.telemetry.metrics.not_continued("no_replica")
        await self._end_stream()

    def _seam_note(self, dispatch: Dispatch) -> bytes:
        """Return the comment at the seam of a continued answer. It names the replica where the headers do."""
        named = self.state.routing.client_policies.may_see_estimates(self.request.route.client)
        return b": x-gorgo-continued %s\n\n" % dispatch.replica.encode() if named else b": x-gorgo-continued\n\n"

    async def _end_stream(self) -> None:
        """End a response that has begun, with the engine's own error event or else with one of the proxy's."""
        passage = None if self._answer is None else self._answer.passage
        if passage is not None and passage.has_error:
            await passage.end_with_error()
        else:
            await self.response.end_stream(502, "upstream_failed", "the replica failed in the middle of its response")
