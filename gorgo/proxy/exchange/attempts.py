"""The attempts at one request: each from its dispatch to its end, one after the other or two side by side.

Owns what is sent to a replica and what its answer, its failure or its silence means, and the guarantee that every
attempt the Router dispatched is told finished exactly once, in whatever way it ends. Which attempt is the answer is
`race`'s, what the next one is the Router's.

Theory of operation: each attempt has one `finally`; until it learns better, its outcome is that the client left, which
is what a cancellation at any point means.
"""

from __future__ import annotations

import asyncio
from time import monotonic

from gorgo.core.messages.actions import Action, Dispatch
from gorgo.core.messages.request import AttemptResult, Outcome
from gorgo.proxy.exchange.accounting import RequestRecord
from gorgo.proxy.exchange.parse import ParsedRequest
from gorgo.proxy.exchange.pending import Resolution
from gorgo.proxy.exchange.race import Race
from gorgo.proxy.exchange.relay import Relay, RelayOptions, failure_of
from gorgo.proxy.exchange.response import ClientResponse
from gorgo.proxy.http.headers import Header, upstream_headers
from gorgo.proxy.http.timeout import ResettableTimeout
from gorgo.proxy.logs import log_failure, log_missing
from gorgo.proxy.state import RunningProxy
from gorgo.proxy.upstream.client import CONNECTION_LOST, POOL_EXHAUSTED, UpstreamError
from gorgo.proxy.upstream.target import Target


class Attempts:
    """All attempts at one request.

    Parameters
    ----------
    state:
        The proxy's.
    route:
        Path of the request.
    headers:
        As the client sent them.
    ask:
        The request, read.
    answer, account:
        Of this request.
    """

    __slots__ = ("_account", "_answer", "_ask", "_headers", "_route", "_state", "race")

    def __init__(
        self,
        state: RunningProxy,
        route: str,
        headers: list[Header],
        ask: ParsedRequest,
        answer: ClientResponse,
        account: RequestRecord,
    ) -> None:
        self._state = state
        self._route = route
        self._headers = headers
        self._ask = ask
        self._answer = answer
        self._account = account
        self.race = Race()

    def acquire(self, dispatch: Dispatch) -> Target:
        """Where it goes. In the step of the dispatch, so it is the process that the Router meant; it may leave the
        fleet from here on.
        """
        target = self._state.targets[dispatch.replica]
        target.acquire()
        return target

    def cancel(self, dispatch: Dispatch, target: Target) -> None:
        """A dispatch that came when the client had left: nothing was sent."""
        target.release()
        self._state.gateway.finish(dispatch, Outcome(AttemptResult.CLIENT_DISCONNECTED))

    def hedge(self, dispatch: Dispatch) -> None:
        """A second attempt beside the first, in a task of its own, unless the answer has begun."""
        if self.race.winner is not None or self._answer.sink.started or self.race.hedge_task is not None:
            self._state.gateway.finish(dispatch, Outcome(AttemptResult.SUPERSEDED))
            return
        self._account.hedged = True
        self._state.metrics.hedged(dispatch.replica, dispatch.region)
        self.race.add(dispatch.attempt_id, self._run_hedge(dispatch, self.acquire(dispatch)))

    async def run(self, dispatch: Dispatch, target: Target) -> Action | None:
        """One dispatch to its end. Answers what the Router wants next, `None` when it wants nothing of this attempt."""
        task = asyncio.current_task()
        assert task is not None
        outcome = Outcome(AttemptResult.CLIENT_DISCONNECTED)
        try:
            self.race.begin(dispatch.attempt_id)
            self._account.attempt_started(self._state, dispatch)
            outcome = await self._try(dispatch, target)
        except asyncio.CancelledError:
            if dispatch.attempt_id in self.race or self._answer.disconnected:
                raise
            task.uncancel()
            outcome = Outcome(AttemptResult.SUPERSEDED)
        finally:
            # What must be given back comes first, whatever befalls those who only keep accounts.
            self.race.done(dispatch.attempt_id)
            target.release()
            action = self._state.gateway.finish(dispatch, outcome)
            self._learn(dispatch, outcome, target)
            self._account.attempt_ended(self._state, dispatch, outcome)
        if isinstance(action, Dispatch):
            self._state.metrics.retried(outcome.result.value)
        return action

    def _learn(self, dispatch: Dispatch, outcome: Outcome, target: Target) -> None:
        """Update the model's bytes per token and the engine's missing reports from the usage of a response."""
        if outcome.prompt_tokens is None:
            return
        if outcome.result is AttemptResult.COMPLETED:
            estimated = dispatch.decision.estimated_cached_tokens
            missing = target.reports.on_answer(cached_tokens=outcome.cached_tokens, estimated_tokens=estimated)
            log_missing(dispatch.replica, missing)
        prompt = self._ask.prompt
        if prompt.tokens is None:
            model = self._ask.route.model
            self._state.ratios.learn(model, text_bytes=len(prompt.text), prompt_tokens=outcome.prompt_tokens)

    async def stop_hedge(self) -> None:
        """The request is over, whatever a second attempt is at."""
        left = await self.race.end()
        if isinstance(left, BaseException):
            log_failure("internal_error", left, request_id=self._answer.request_id)
        elif left is not None and isinstance(left[0], Dispatch) and left[1] is not None:
            self.cancel(left[0], left[1])

    async def _run_hedge(self, dispatch: Dispatch, target: Target) -> Resolution | None:
        """The second attempt, unless it was beaten before its task began."""
        if dispatch.attempt_id not in self.race:
            target.release()
            self._state.gateway.finish(dispatch, Outcome(AttemptResult.SUPERSEDED))
            return None
        action = await self.run(dispatch, target)
        if action is None:
            return None
        return action, self.acquire(action) if isinstance(action, Dispatch) else None

    async def _try(self, dispatch: Dispatch, target: Target) -> Outcome:
        limits, spent_s = target.deadlines, self._state.clock() - self._account.received_s
        first_s = limits.first_token_s if self._ask.route.streamed else limits.response_s
        dog = ResettableTimeout(first_s, last=monotonic() + limits.request_s - spent_s)
        try:
            with dog:
                return await self._relay(dispatch, target, dog)
        except UpstreamError as failure:
            if failure.reason in CONNECTION_LOST:
                target.connection_lost.set()
            return await self._upstream_failed(failure.reason)
        except TimeoutError:
            if dog.timed_out:
                return await self._deadline_exceeded()
            sink = self._answer.sink
            if sink.sending:
                # The client stopped reading for as long as a replica may stay silent: it is cut, not waited for.
                self._answer.disconnected = True
                return Outcome(AttemptResult.CLIENT_DISCONNECTED, status=sink.status, error="client_stalled")
            return await self._upstream_failed("timeout")

    async def _relay(self, dispatch: Dispatch, target: Target, dog: ResettableTimeout) -> Outcome:
        with_usage = self._ask.with_usage if target.request_usage else None
        headers = upstream_headers(self._headers, request_id=self._answer.request_id, api_key=target.api_key)
        if self._account.trace is not None:
            headers = self._account.trace.carry(headers, dispatch.attempt_id)
        body = self._ask.body if with_usage is None else with_usage
        source = await target.upstream.open(self._route, headers, body)
        try:
            failure = failure_of(source.status)
            if failure is not None:
                return failure
            plan = self._plan(dispatch, target, strip_usage=with_usage is not None)
            return await Relay(source, self._answer.sink, dog, plan).run()
        finally:
            await source.aclose()

    def _plan(self, dispatch: Dispatch, target: Target, *, strip_usage: bool) -> RelayOptions:
        def on_content() -> None:
            now = self._state.clock()
            self._commit(dispatch)
            self._state.gateway.first_token(dispatch.attempt_id, now=now)
            self._account.first_content(self._state, dispatch, now=now)

        def on_head(head: bytes) -> None:
            if self._state.targets.get(dispatch.replica) is target:
                self._state.stored_responses.record(head, dispatch.replica)

        return RelayOptions(
            route=self._route,
            own_headers=_own_headers(self._answer.request_id, dispatch),
            chunk_limit_s=target.deadlines.stream_idle_s,
            strip_usage=strip_usage,
            on_content=on_content,
            on_commit=lambda: self._commit(dispatch),
            on_head=on_head if self._route == "/v1/responses" else None,
        )

    def _commit(self, dispatch: Dispatch) -> None:
        """Called before anything is sent to the client: from here on this attempt is the answer."""
        self.race.claim(dispatch.attempt_id)
        self._account.replica = dispatch.replica

    async def _upstream_failed(self, reason: str) -> Outcome:
        """The replica failed. Once anything was sent, only the client can be told."""
        if not self._answer.sink.started:
            # Without a connection for it the replica is busy, not broken.
            ending = AttemptResult.BUSY if reason == POOL_EXHAUSTED else AttemptResult.FAILED_BEFORE_CONTENT
            return Outcome(ending, error=reason)
        await self._answer.end_stream(502, "upstream_failed", "the replica broke off in the middle of its answer")
        return Outcome(AttemptResult.FAILED_AFTER_CONTENT, status=self._answer.sink.status, error=reason)

    async def _deadline_exceeded(self) -> Outcome:
        """It has taken as long as it may in all, other attempts and waits included. No replica is to blame."""
        if not self._answer.sink.started:
            return Outcome(AttemptResult.DEADLINE_EXCEEDED, error="total_timeout")
        await self._answer.end_stream(504, "total_timeout", "the answer took longer than a request may take in all")
        return Outcome(AttemptResult.DEADLINE_EXCEEDED, status=self._answer.sink.status, error="total_timeout")


def _own_headers(request_id: str, dispatch: Dispatch) -> list[Header]:
    decision = dispatch.decision
    headers = [
        (b"x-request-id", request_id.encode()),
        (b"x-gorgo-replica", dispatch.replica.encode()),
        (b"x-gorgo-region", dispatch.region.encode()),
        (b"x-gorgo-policy", decision.policy.encode()),
        (b"x-gorgo-weights-version", b"%d" % decision.weights_version),
        (b"x-gorgo-estimated-cached-tokens", b"%d" % decision.estimated_cached_tokens),
    ]
    if decision.predicted_ttft_s is not None:
        headers.append((b"x-gorgo-predicted-ttft-ms", b"%.1f" % (decision.predicted_ttft_s * 1e3)))
    return headers
