"""One request from its first byte to its last: read, route, attempt until an answer is committed to, account.

Owns the order of things. Leaves the choice to the Router, what happens at a replica to `attempts`, and what the client
is told instead of a replica's answer to `answer`.

Theory of operation: one task per exchange, the server's own. A second, tiny one waits for the client to leave and
cancels the first.
"""

from __future__ import annotations

import asyncio
from time import perf_counter
from typing import Any

from gorgo.core.messages.actions import Action, Cancel, Dispatch, Hedge, Hold, Reject
from gorgo.proxy.exchange.accounting import RequestRecord
from gorgo.proxy.exchange.attempts import Attempts
from gorgo.proxy.exchange.parse import ParsedRequest, parse_request
from gorgo.proxy.exchange.pending import PendingDispatch, Resolution
from gorgo.proxy.exchange.response import ClientResponse
from gorgo.proxy.http.body import ClientDisconnected, draining, read_body
from gorgo.proxy.http.errors import HttpError, Message, Receive, Send, error_of
from gorgo.proxy.http.headers import Header, request_id
from gorgo.proxy.logs import log_failure
from gorgo.proxy.state import RunningProxy
from gorgo.proxy.upstream.target import Target


class InferenceEndpoint:
    """An ASGI app for one route: every POST is an exchange."""

    def __init__(self, state: RunningProxy, route: str) -> None:
        self._state = state
        self._route = route

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        exchange = Exchange(self._state, self._route, scope, receive, send)
        task = asyncio.current_task()
        assert task is not None
        self._state.exchanges.add(task)
        try:
            await exchange.run(task)
        finally:
            self._state.exchanges.discard(task)


class Exchange:
    """One request and its answer."""

    __slots__ = (
        "_account",
        "_answer",
        "_attempts",
        "_client",
        "_headers",
        "_id",
        "_method",
        "_pending",
        "_receive",
        "_received_s",
        "_route",
        "_route_id",
        "_state",
    )

    def __init__(self, state: RunningProxy, route: str, scope: Message, receive: Receive, send: Send) -> None:
        self._state = state
        self._route = route
        self._method: str = scope["method"]
        #: Whose key it was, where clients need one.
        self._client: str | None = scope.get("gorgo.client")
        self._headers: list[Header] = scope["headers"]
        self._receive = receive
        self._received_s = state.clock()
        self._id = request_id(self._headers)
        #: By which the Router knows it, while it does.
        self._route_id: str | None = None
        self._account = RequestRecord(self._received_s)
        self._answer = ClientResponse(state, send, self._id, self._account)
        #: Once it is routed.
        self._attempts: Attempts | None = None
        if state.tracing is not None:
            self._account.trace = state.tracing.begin(
                self._headers, route=route, request_id=self._id, received_s=self._received_s
            )
        #: Where its turn is told while it waits for a replica.
        self._pending: PendingDispatch | None = None

    async def run(self, task: asyncio.Task[Any]) -> None:
        """Serve it, and whatever happens leave one log line and one count."""
        watch: asyncio.Task[None] | None = None
        try:
            try:
                ask = await self._read()
            except HttpError as refusal:
                async with draining(self._receive):
                    await self._answer.send_error(refusal)
                return
            watch = asyncio.create_task(self._watch(task))
            await self._serve(ask)
        except ClientDisconnected:
            self._answer.disconnected = True
        except asyncio.CancelledError:
            if not self._answer.disconnected and not self._state.stopping:
                raise
            task.uncancel()
            if self._attempts is not None:
                await self._attempts.stop_hedge()  # before the last words: it may be the one that speaks
            await self._answer.abort()
        except HttpError as refusal:
            await self._answer.send_error(refusal)
        except Exception as failure:  # noqa: BLE001 - the border of one request: a fault in it must not end the others
            self._account.status, self._account.code = 500, "internal_error"
            log_failure("internal_error", failure, request_id=self._id)
            if not self._answer.sink.started:
                await self._answer.send_error(
                    HttpError(500, "internal_error", "the proxy failed; the log has its request id")
                )
        finally:
            if watch is not None:
                watch.cancel()
            if self._attempts is not None:
                await self._attempts.stop_hedge()
            if self._route_id is not None:
                self._state.gateway.unregister(self._route_id)
            self._account.close(
                self._state, self._route, self._id, sent_status=self._answer.sink.status, gone=self._answer.disconnected
            )

    # -- what is asked

    async def _read(self) -> ParsedRequest:
        if self._method != "POST":
            raise HttpError(405, "method_not_allowed", "expected POST", headers=((b"allow", b"POST"),))
        limit = self._state.limits.max_in_flight
        if len(self._state.exchanges) > limit:
            # Before the body is read: so many are enough to hold in memory.
            message = f"{limit} requests are in flight, the most this proxy takes"
            raise HttpError(429, "too_many_in_flight", message, headers=((b"retry-after", b"1"),))
        if self._state.stopping:
            raise HttpError(503, "stopping", "this proxy is stopping", headers=((b"retry-after", b"1"),))
        with self._state.uploads.track(self._client):
            body = await read_body(self._receive, self._headers, limits=self._state.limits)
        self._account.body_read(self._state)
        started = perf_counter()
        self._route_id = route_id = self._state.gateway.register(self._id, self)
        ask = parse_request(
            self._state,
            self._route,
            self._headers,
            body,
            request_id=route_id,
            received_s=self._received_s,
            client=self._client,
        )
        self._account.decision_s = perf_counter() - started
        self._account.request = ask
        return ask

    @property
    def _stored_response_id(self) -> str:
        assert self._route_id is not None, "the Router knows it"
        return self._route_id

    @property
    def _route_request(self) -> Attempts:
        assert self._attempts is not None, "the Router knows it"
        return self._attempts

    # -- attempts

    async def _serve(self, ask: ParsedRequest) -> None:
        attempts = self._attempts = Attempts(self._state, self._route, self._headers, ask, self._answer, self._account)
        started = perf_counter()
        action: Action | None = self._state.gateway.submit(ask.route)
        self._state.metrics.decided(self._account.decision_s + perf_counter() - started)
        taken: Target | None = None
        if isinstance(action, Hold):
            action, taken = await self._wait_in_time()
        while isinstance(action, Dispatch):
            action = await attempts.run(action, taken or attempts.acquire(action))
            taken = None
            if action is None and attempts.race.hedge_task is not None:
                # It has lost, or failed while the other one was open: how the request ends is the other's affair.
                action, taken = await attempts.race.join() or (None, None)
        if isinstance(action, Reject):
            raise error_of(action)

    async def _wait_in_time(self) -> Resolution:
        limit_s = self._state.limits.request_timeout_s
        try:
            async with asyncio.timeout(limit_s - (self._state.clock() - self._received_s)):
                return await self._wait()
        except TimeoutError:
            message = f"no replica could take the request within the {limit_s:g} s that it may take in all"
            raise HttpError(504, "total_timeout", message) from None

    async def _wait(self) -> Resolution:
        """Until the Router has decided, in whichever event that comes to be."""
        self._pending = held = PendingDispatch(self._state.clock())
        try:
            return await held.told
        except asyncio.CancelledError:
            left = held.unclaimed()
            if left is None:
                self._state.gateway.abandon(self._stored_response_id)
            elif isinstance(left[0], Dispatch) and left[1] is not None:
                self._route_request.cancel(left[0], left[1])
            raise
        finally:
            self._pending = None
            self._account.queued_s = self._state.clock() - held.enqueued_s
            self._state.metrics.queued(self._account.queued_s)

    def deliver(self, action: Action) -> None:
        """What the Router wants of this request, from an event of another one or of time. Never waits."""
        attempts = self._route_request
        match action:
            case Dispatch() if self._pending is not None:
                target = attempts.acquire(action)
                if not self._pending.resolve(action, target):
                    attempts.cancel(action, target)
            case Reject() if self._pending is not None:
                self._pending.resolve(action, None)
            case Hedge():
                attempts.hedge(action.dispatch)
            case Cancel():
                attempts.race.cancel(action.attempt_id)
            case _:
                raise AssertionError(f"{type(action).__name__} for a request that does not wait")

    async def _watch(self, task: asyncio.Task[Any]) -> None:
        """When the client leaves, end `task` at once."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._answer.sink.finished:
            self._answer.disconnected = True
            task.cancel()
