"""The attempts at one request: each from its dispatch to its end, one after the other or two side by side.

Owns what is sent to a replica, and the result of its response, failure or silence. Guarantees that each dispatch of the
Router is finished exactly once. The winner of two attempts is `race`'s, the next one the Router's.

Theory of operation: each attempt has one `finally`. Until a result is known, its outcome is a disconnected client: the
meaning of a cancellation at any point.
"""

from __future__ import annotations

import asyncio
from functools import partial
from time import monotonic
from typing import Any

from gorgo.core.messages.actions import Dispatch
from gorgo.core.messages.request import AttemptResult, Outcome
from gorgo.live.http.headers import Header
from gorgo.live.http.request_buffer import RequestBuffer
from gorgo.live.http.request_headers import headers_for_replica
from gorgo.live.http.timeout import ResettableTimeout
from gorgo.live.logs import log_failure
from gorgo.live.request.judgement import failure_of
from gorgo.live.request.parse import ParsedRequest
from gorgo.live.request.record import RequestRecord
from gorgo.live.state import LiveState
from gorgo.live.upstream.client import CONNECTION_LOST, POOL_EXHAUSTED, UpstreamError
from gorgo.live.upstream.target import Target
from gorgo.proxy.exchange.commitment import Commitment
from gorgo.proxy.exchange.lease import Lease, NextStep
from gorgo.proxy.exchange.passage import Passage
from gorgo.proxy.exchange.race import Race
from gorgo.proxy.exchange.refusal import Refusal
from gorgo.proxy.exchange.relay import relay
from gorgo.proxy.exchange.relay_options import RelayOptions, own_headers
from gorgo.proxy.exchange.response import ClientResponse


class Attempts:
    """All attempts at one request.

    Parameters
    ----------
    state:
        The running proxy.
    route:
        Path of the request.
    headers:
        As the client sent them.
    request, response, record, buffer, task:
        Of this request.
    """

    __slots__ = (
        "_buffer",
        "_headers",
        "_race",
        "_record",
        "_refused",
        "_request",
        "_response",
        "_route",
        "_state",
        "_task",
    )

    def __init__(
        self,
        state: LiveState,
        route: str,
        headers: list[Header],
        request: ParsedRequest,
        response: ClientResponse,
        record: RequestRecord,
        buffer: RequestBuffer,
        task: asyncio.Task[Any],
    ) -> None:
        self._buffer = buffer
        self._task = task
        self._state = state
        self._route = route
        self._headers = headers
        self._request = request
        self._response = response
        self._record = record
        self._race = Race()
        #: The last refusal, which the client has not been sent.
        self._refused: tuple[Dispatch, Refusal, float] | None = None

    @property
    def has_hedge(self) -> bool:
        """Whether a second attempt was started, and not joined."""
        return self._race.hedge_task is not None

    def lease(self, dispatch: Dispatch) -> Lease:
        """Put the replica of a dispatch in use. Called in the step of the dispatch."""
        target = self._state.replicas.targets[dispatch.replica]
        target.acquire()
        return Lease(dispatch, target)

    def cancel(self, lease: Lease) -> None:
        """Give back a dispatch of which nothing was sent, because the client has disconnected."""
        self._give_back(lease, AttemptResult.CLIENT_DISCONNECTED)

    def supersede(self, attempt_id: str) -> None:
        """Stop an attempt because another one has claimed the response."""
        self._race.cancel(attempt_id)

    def hedge(self, dispatch: Dispatch) -> None:
        """Start a second attempt beside the first, in a task of its own, unless the response has begun."""
        race = self._race
        if race.winner is not None or self._response.writer.started or race.hedge_task is not None:
            self._state.routing.gateway.finish(dispatch, Outcome(AttemptResult.SUPERSEDED))
            return
        self._record.hedged = True
        self._state.telemetry.metrics.hedged(dispatch.replica, dispatch.region)
        race.start_hedge(dispatch.attempt_id, self._run_hedge(self.lease(dispatch)))

    async def next(self, lease: Lease) -> NextStep | None:
        """Run an attempt to its end. Return the request's next step, None if it has ended."""
        step = await self._run(lease, self._task)
        if step is None and self._race.hedge_task is not None:
            # This attempt lost, or failed while the hedge was open: the hedge decides how the request ends.
            return await self._race.join()
        return step

    async def forward(self) -> None:
        """Send the client the last refusal. A client that does not read it is disconnected."""
        assert self._refused is not None, "a replica has refused"
        refused, refusal, limit_s = self._refused
        self._commitment(refused).commit()
        try:
            async with asyncio.timeout(limit_s):
                await refusal.send(self._response.writer)
        except TimeoutError:
            self._response.disconnected = True

    async def stop_hedge(self) -> None:
        """Stop a second attempt at the end of the request."""
        left = await self._race.end()
        if isinstance(left, BaseException):
            log_failure("internal_error", left, request_id=self._response.request_id)
        elif isinstance(left, Lease):
            self.cancel(left)

    async def _run(self, lease: Lease, task: asyncio.Task[Any]) -> NextStep | None:
        dispatch = lease.dispatch
        outcome = Outcome(AttemptResult.CLIENT_DISCONNECTED)
        try:
            self._race.track(dispatch.attempt_id, task)
            self._record.attempt_started(dispatch)
            outcome = await self._try(lease, task)
        except asyncio.CancelledError:
            if dispatch.attempt_id in self._race or self._response.disconnected:
                raise
            task.uncancel()
            outcome = Outcome(AttemptResult.SUPERSEDED)
        finally:
            # Reservations are released first, so that no failure in the records can keep them.
            self._race.done(dispatch.attempt_id)
            lease.target.release()
            action = self._state.routing.gateway.finish(dispatch, outcome)
            self._count(lease)
            self._state.replicas.check_usage(dispatch, lease.target, outcome)
            self._record.attempt_ended(dispatch, outcome)
        if not isinstance(action, Dispatch):
            return action
        self._state.telemetry.metrics.retried(outcome.result.value)
        return self.lease(action)

    async def _run_hedge(self, lease: Lease) -> NextStep | None:
        """Run the second attempt, unless it was stopped before its task began."""
        if lease.dispatch.attempt_id in self._race:
            task = asyncio.current_task()
            assert task is not None, "a hedge runs in a task of its own"
            return await self._run(lease, task)
        self._give_back(lease, AttemptResult.SUPERSEDED)
        return None

    def _give_back(self, lease: Lease, result: AttemptResult) -> None:
        lease.target.release()
        self._state.routing.gateway.finish(lease.dispatch, Outcome(result))

    def _count(self, lease: Lease) -> None:
        """Count the attempt in the metrics, once."""
        if not lease.counted:
            lease.counted = True
            dispatch = lease.dispatch
            self._state.telemetry.metrics.dispatched(dispatch.replica, dispatch.region, dispatch.decision)

    async def _try(self, lease: Lease, task: asyncio.Task[Any]) -> Outcome:
        target = lease.target
        limits, spent_s = target.deadlines, self._state.routing.clock() - self._record.received_s
        first_s = limits.first_token_s if self._request.route.streamed else limits.response_s
        timer = ResettableTimeout(first_s, last=monotonic() + limits.request_s - spent_s, task=task)
        try:
            with timer:
                return await self._relay(lease, timer)
        except UpstreamError as failure:
            if failure.reason in CONNECTION_LOST:
                target.connection_lost.set()
            if failure.cause is not None:
                self._record.cause = target.last_failure = failure.cause
            return await self._upstream_failed(failure.reason)
        except TimeoutError:
            if timer.timed_out:
                return await self._deadline_exceeded()
            writer = self._response.writer
            if writer.sending:
                # The client has not read for as long as a replica may be silent: the response is cut.
                self._response.disconnected = True
                return Outcome(AttemptResult.CLIENT_DISCONNECTED, status=writer.status, error="client_stalled")
            return await self._upstream_failed("timeout")

    async def _relay(self, lease: Lease, timer: ResettableTimeout) -> Outcome:
        dispatch, target = lease.dispatch, lease.target
        strip_usage = target.request_usage and self._request.adds_usage
        headers = headers_for_replica(
            self._headers,
            request_id=self._response.request_id,
            api_key=target.api_key,
            passed=self._state.passed_headers,
        )
        if self._record.trace is not None:
            headers = self._record.trace.carry(headers, dispatch.attempt_id)
        model = self._request.route.model
        name = None if model is None else self._state.routing.models.engine_name(dispatch.replica, model)
        options: RelayOptions | None = None

        def on_sent() -> None:
            """Do what the replica does not wait for."""
            nonlocal options
            self._count(lease)
            options = self._relay_options(dispatch, target, strip_usage=strip_usage)

        # Not in a variable, which would hold the body for as long as the response takes.
        source = await target.upstream.open(
            self._route, headers, self._request.body_for(name, with_usage=target.request_usage), on_sent=on_sent
        )
        try:
            failure = failure_of(source.status, source.headers)
            if failure is not None:
                return failure
            if options is None:
                options = self._relay_options(dispatch, target, strip_usage=strip_usage)
            passage = Passage(source, self._response.writer, timer, options)
            outcome = await relay(passage)
            if passage.refusal is not None and (self._refused is None or self._refused[1].status >= 400):
                # A short answer is not replaced: it is better than another replica's refusal.
                self._refused = dispatch, passage.refusal, target.deadlines.stream_idle_s
            return outcome
        finally:
            await source.aclose()

    def _relay_options(self, dispatch: Dispatch, target: Target, *, strip_usage: bool) -> RelayOptions:
        state, client = self._state, self._request.route.client
        commitment = self._commitment(dispatch)
        estimates = state.routing.client_policies.may_see_estimates(client)
        return RelayOptions(  # by position, as in gorgo.core.dispatch.outcomes
            self._route,
            own_headers(self._response.request_id, dispatch, estimates=estimates),  # own_headers
            target.deadlines.stream_idle_s,  # chunk_limit_s
            strip_usage,
            commitment.first_content,  # on_content
            commitment.commit,  # on_commit
            self._buffer,
            partial(state.replicas.record_stored, dispatch, target, client=client)
            if self._route == "/v1/responses"
            else None,  # on_head
            dispatch.withhold,
            self._request.may_be_short,
            state.passed_headers,
        )

    def _commitment(self, dispatch: Dispatch) -> Commitment:
        return Commitment(self._state, self._race, self._record, self._request, self._buffer, dispatch)

    async def _upstream_failed(self, reason: str) -> Outcome:
        """Return the outcome of a failed replica. If the response has begun, end it with an error."""
        if not self._response.writer.started:
            # Without a free connection the replica is busy, not broken.
            result = AttemptResult.BUSY if reason == POOL_EXHAUSTED else AttemptResult.FAILED_BEFORE_CONTENT
            return Outcome(result, error=reason)
        await self._response.end_stream(502, "upstream_failed", "the replica failed in the middle of its response")
        return Outcome(AttemptResult.FAILED_AFTER_CONTENT, status=self._response.writer.status, error=reason)

    async def _deadline_exceeded(self) -> Outcome:
        """Return the outcome of a request that reached its timeout, earlier attempts and waits included."""
        if not self._response.writer.started:
            return Outcome(AttemptResult.DEADLINE_EXCEEDED, error="total_timeout")
        await self._response.end_stream(504, "total_timeout", "the request timeout ended the response")
        return Outcome(AttemptResult.DEADLINE_EXCEEDED, status=self._response.writer.status, error="total_timeout")
