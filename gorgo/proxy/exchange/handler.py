"""One request from its first byte to its last: read, route, attempt until a response is complete, record.

Owns the order of these steps. Leaves the choice to the Router, the work at a replica to `attempts`, and responses of
the proxy's own to `response`.

Theory of operation: one task per exchange, the server's own. A second, small one waits for the client to disconnect and
cancels the first.
"""

from __future__ import annotations

import asyncio
from time import perf_counter
from typing import Any

from gorgo.core.messages.actions import Action, Cancel, Dispatch, Forward, Hedge, Hold, Reject
from gorgo.live.http.body import ClientDisconnected, draining, read_body, take_whole_body
from gorgo.live.http.errors import HttpError, Message, Receive, Send
from gorgo.live.http.headers import Header
from gorgo.live.http.request_buffer import RequestBuffer, buffer_client
from gorgo.live.http.request_headers import request_id_of
from gorgo.live.logs import log_failure
from gorgo.live.parsing.fields import BodyFields, read_quick_fields
from gorgo.live.parsing.json_body import check_media_type
from gorgo.live.request.parse import ParsedRequest, count_tokens, parse_request
from gorgo.live.request.record import RequestRecord
from gorgo.live.request.refusals import check_method, check_open, error_for, internal_error
from gorgo.live.state import LiveState
from gorgo.proxy.exchange.attempts import Attempts
from gorgo.proxy.exchange.lease import Lease, NextStep, PendingDispatch
from gorgo.proxy.exchange.response import ClientResponse
from gorgo.proxy.http.response_writer import direct_write


class InferenceEndpoint:
    """An ASGI app for one route: every POST is an exchange."""

    def __init__(self, state: LiveState, route: str) -> None:
        self._state = state
        self._route = route
        #: Looked up once: in Python 3.11 this is a system call.
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        exchange = Exchange(self._state, self._route, scope, receive, send)
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        task = asyncio.current_task(self._loop)
        assert task is not None
        self._state.exchanges.add(task)
        try:
            await exchange.run(task)
        finally:
            self._state.exchanges.discard(task)


class Exchange:
    """One request and its response."""

    __slots__ = (
        "_attempts",
        "_buffer",
        "_client",
        "_extensions",
        "_headers",
        "_id",
        "_method",
        "_pending",
        "_receive",
        "_received_s",
        "_record",
        "_response",
        "_route",
        "_router_id",
        "_state",
        "_task",
    )

    def __init__(self, state: LiveState, route: str, scope: Message, receive: Receive, send: Send) -> None:
        self._state = state
        self._route = route
        self._method: str = scope["method"]
        #: The name of the client's key, where clients need one.
        self._client: str | None = scope.get("gorgo.client")
        self._headers: list[Header] = scope["headers"]
        #: What the listener offers beside ASGI: the whole body, and a call when the client disconnects.
        self._extensions: dict[str, Any] = scope.get("extensions") or {}
        self._task: asyncio.Task[Any] | None = None
        self._buffer = RequestBuffer(state.buffers, buffer_client(scope))
        self._receive = receive
        self._received_s = state.routing.clock()
        self._id = request_id_of(self._headers)
        #: The id of the request in the Router; None before and after.
        self._router_id: str | None = None
        self._record = RequestRecord(state.routing, state.telemetry, self._received_s, client=self._client)
        self._response = ClientResponse(state, send, self._id, self._record, route, direct_write(scope))
        #: None before the request is parsed.
        self._attempts: Attempts | None = None
        if state.telemetry.tracing is not None:
            self._record.trace = state.telemetry.tracing.start(
                self._headers, route=route, request_id=self._id, received_s=self._received_s
            )
        #: The wait of a queued request.
        self._pending: PendingDispatch | None = None

    async def run(self, task: asyncio.Task[Any]) -> None:
        """Serve the request. Whatever happens, record one log line and one count."""
        disconnect: asyncio.Task[None] | None = None
        self._task = task
        try:
            try:
                request = await self._read()
            except HttpError as error:
                async with draining(self._receive):
                    await self._response.send_error(error)
                return
            on_disconnect = self._extensions.get("gorgo.on_disconnect")
            if on_disconnect is None:
                disconnect = asyncio.create_task(self._wait_for_disconnect())
            else:
                on_disconnect(self._client_disconnected)
            await self._serve(request)
        except ClientDisconnected:
            self._response.disconnected = True
        except asyncio.CancelledError:
            if not self._response.disconnected and not self._state.stopping:
                raise
            task.uncancel()
            if self._attempts is not None:
                await self._attempts.stop_hedge()  # before the abort: the hedge may be writing
            await self._response.abort()
        except HttpError as error:
            await self._response.send_error(error)
        except Exception as failure:  # noqa: BLE001 - the border of one request: a fault in it must not end the others
            self._record.status, self._record.code = 500, "internal_error"
            log_failure("internal_error", failure, request_id=self._id)
            if not self._response.writer.started:
                await self._response.send_error(internal_error(self._state))
        finally:
            if disconnect is not None:
                disconnect.cancel()
            if self._attempts is not None and self._attempts.has_hedge:
                await self._attempts.stop_hedge()
            if self._router_id is not None:
                self._state.routing.gateway.unregister(self._router_id)
            self._buffer.release()
            self._record.close(
                self._route,
                self._id,
                sent_status=self._response.writer.status,
                disconnected=self._response.disconnected,
            )

    # -- the request

    async def _read(self) -> ParsedRequest:
        check_method(self._method)
        check_open(self._state, open_requests=len(self._state.exchanges))
        body = await self._read_body()
        self._record.body_read()
        self._router_id = self._state.routing.gateway.register(self._id, self)
        request = await self._parse(body)
        self._record.request = request
        return request

    async def _read_body(self) -> bytes:
        limits, uploads = self._state.limits, self._state.routing.uploads
        if "gorgo.body" in self._extensions:
            uploads.check(self._client)
            # Taken out of the scope and the connection, which would hold it for as long as the response takes.
            await self._receive()
            return take_whole_body(self._extensions.pop("gorgo.body"), limits=limits, buffer=self._buffer)
        with uploads.track(self._client):
            return await read_body(self._receive, self._headers, limits=limits, buffer=self._buffer)

    async def _parse(self, body: bytes) -> ParsedRequest:
        """Parse the body, here if that takes milliseconds; look for a model that no replica is known to serve."""
        state = self._state
        started = perf_counter()
        check_media_type(self._headers)
        fields = read_quick_fields(self._route, body, state.routing.fingerprinter)
        if fields is None:
            fields = await state.routing.body_workers.read(self._route, body)
        fields.exact = await count_tokens(state.routing, self._route, fields)
        fields.prompt = None  # as large as the body, and needed no more
        self._record.decision_s = perf_counter() - started
        request = self._parse_now(body, fields)
        model = request.route.model
        if (
            model is None
            or state.routing.router.lists(model)
            or not await state.routing.models.find_missing(model, now=state.routing.clock())
        ):
            return request
        return self._parse_now(body, fields)

    def _parse_now(self, body: bytes, fields: BodyFields) -> ParsedRequest:
        assert self._router_id is not None
        started = perf_counter()
        request = parse_request(
            self._state.routing,
            self._state.replicas.stored_responses,
            self._route,
            self._headers,
            body,
            fields,
            request_id=self._router_id,
            received_s=self._received_s,
            client=self._client,
        )
        self._record.decision_s += perf_counter() - started
        return request

    # -- its attempts

    async def _serve(self, request: ParsedRequest) -> None:
        assert self._task is not None, "it runs"
        attempts = self._attempts = Attempts(
            self._state, self._route, self._headers, request, self._response, self._record, self._buffer, self._task
        )
        started = perf_counter()
        action = self._state.routing.gateway.submit(request.route)
        self._state.telemetry.metrics.decided(self._record.decision_s + perf_counter() - started)
        step: NextStep | None
        if isinstance(action, Hold):
            step = await self._wait_in_queue(request.route.request_id)
        else:
            step = attempts.lease(action) if isinstance(action, Dispatch) else action
        while isinstance(step, Lease):
            step = await attempts.next(step)
        if isinstance(step, Forward):
            await attempts.forward()
        elif step is not None:
            raise error_for(self._state.routing, step, request)

    async def _wait_in_queue(self, request_id: str) -> NextStep:
        limit_s = self._state.limits.request_timeout_s
        try:
            async with asyncio.timeout(limit_s - (self._state.routing.clock() - self._received_s)):
                return await self._wait(request_id)
        except TimeoutError:
            message = f"no replica could take the request within its timeout of {limit_s:g} s"
            raise HttpError(504, "total_timeout", message) from None

    async def _wait(self, request_id: str) -> NextStep:
        """Wait until an event of another request, or of time, makes the Router decide."""
        assert self._attempts is not None
        self._pending = pending = PendingDispatch(self._state.routing.clock())
        try:
            return await pending.wait()
        except asyncio.CancelledError:
            step = pending.unclaimed()
            if step is None:
                self._state.routing.gateway.abandon(request_id)
            elif isinstance(step, Lease):
                self._attempts.cancel(step)
            raise
        finally:
            self._pending = None
            self._record.queued_s = self._state.routing.clock() - pending.enqueued_s
            self._state.telemetry.metrics.queued(self._record.queued_s)

    def deliver(self, action: Action) -> None:
        """Act on a decision of the Router that an event of another request, or of time, caused. Never waits."""
        attempts, pending = self._attempts, self._pending
        assert attempts is not None, "the Router knows the request"
        match action:
            case Dispatch() if pending is not None:
                lease = attempts.lease(action)
                if not pending.resolve(lease):
                    attempts.cancel(lease)
            case Reject() if pending is not None:
                pending.resolve(action)
            case Hedge():
                attempts.hedge(action.dispatch)
            case Cancel():
                attempts.supersede(action.attempt_id)
            case _:
                raise AssertionError(f"{type(action).__name__} for a request that is not queued")

    async def _wait_for_disconnect(self) -> None:
        """Cancel the exchange as soon as the client disconnects."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._client_disconnected()

    def _client_disconnected(self) -> None:
        if not self._response.writer.finished:
            self._response.disconnected = True
            assert self._task is not None, "it runs"
            self._task.cancel()
