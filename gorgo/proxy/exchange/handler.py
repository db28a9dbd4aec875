"""A request from its first byte to its last: read, route, attempt until a response is complete, record.

Owns the order of these steps. Leaves the choice to the Router, a request's parts and its attempts to `exchange`, and
responses of the proxy's own to `ClientResponse`.

Theory of operation: one task per exchange, the server's own. A second, small one waits for the client to disconnect and
cancels the first, where the listener does not call at a disconnect.
"""

from __future__ import annotations

import asyncio
from time import perf_counter

from gorgo.core.messages.actions import Dispatch, Forward, Hold
from gorgo.live.http.body import ClientDisconnected, draining, read_body, take_whole_body
from gorgo.live.http.errors import HttpError, Message, Receive, Send
from gorgo.live.logs import log_failure
from gorgo.live.parsing.json_body import BodyFields, check_media_type, read_quick_fields
from gorgo.live.request.parse import ParsedRequest, count_tokens, parse_request
from gorgo.live.request.refusals import check_method, check_open, error_for, internal_error
from gorgo.live.state import LiveState
from gorgo.proxy.exchange.exchange import Exchange
from gorgo.proxy.exchange.race import Lease, NextStep


class InferenceEndpoint:
    """An ASGI app for one route: every POST is an exchange."""

    def __init__(self, state: LiveState, route: str) -> None:
        self._state = state
        self._route = route
        #: Looked up once: in Python 3.11 this is a system call.
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        task = asyncio.current_task(self._loop)
        assert task is not None
        exchange = Exchange(self._state, self._route, scope, receive, send, task)
        self._state.exchanges.add(task)
        try:
            await _run(exchange, task)
        finally:
            self._state.exchanges.discard(task)


async def _run(exchange: Exchange, task: asyncio.Task[None]) -> None:
    """Serve the request. Whatever happens, record one log line and one count."""
    disconnect: asyncio.Task[None] | None = None
    state, response, record = exchange.state, exchange.response, exchange.record
    try:
        try:
            request = await _read(exchange)
        except HttpError as error:
            async with draining(exchange.receive):
                await response.send_error(error)
            return
        on_disconnect = exchange.extensions.get("gorgo.on_disconnect")
        if on_disconnect is None:
            disconnect = asyncio.create_task(_wait_for_disconnect(exchange))
        else:
            on_disconnect(exchange.client_disconnected)
        await _serve(exchange, request)
    except ClientDisconnected:
        response.disconnected = True
    except asyncio.CancelledError:
        if not response.disconnected and not state.stopping:
            raise
        task.uncancel()
        await exchange.stop_hedge()  # before the abort: the hedge may be writing
        await response.abort()
    except HttpError as error:
        await response.send_error(error)
    except Exception as failure:  # noqa: BLE001 - the border of one request: a fault in it must not end the others
        record.status, record.code = 500, "internal_error"
        log_failure("internal_error", failure, request_id=exchange.id)
        if not response.writer.started:
            await response.send_error(internal_error(state))
    finally:
        if disconnect is not None:
            disconnect.cancel()
        if exchange.has_hedge:
            await exchange.stop_hedge()
        if exchange.router_id is not None:
            state.routing.gateway.unregister(exchange.router_id)
        exchange.buffer.release()
        record.close(
            exchange.route,
            exchange.id,
            sent_status=response.writer.status,
            disconnected=response.disconnected,
        )


async def _read(exchange: Exchange) -> ParsedRequest:
    state = exchange.state
    check_method(exchange.method)
    check_open(state, open_requests=len(state.exchanges))
    body = await _read_body(exchange)
    exchange.record.body_read()
    exchange.router_id = state.routing.gateway.register(exchange.id, exchange)
    exchange.request = exchange.record.request = request = await _parse(exchange, body)
    return request


async def _read_body(exchange: Exchange) -> bytes:
    limits, uploads, receive = exchange.state.limits, exchange.state.routing.uploads, exchange.receive
    if "gorgo.body" in exchange.extensions:
        uploads.check(exchange.client)
        # Taken out of the scope and the connection, which would hold it for as long as the response takes.
        await receive()
        return take_whole_body(exchange.extensions.pop("gorgo.body"), limits=limits, buffer=exchange.buffer)
    with uploads.track(exchange.client):
        return await read_body(receive, exchange.headers, limits=limits, buffer=exchange.buffer)


async def _parse(exchange: Exchange, body: bytes) -> ParsedRequest:
    """Parse the body, here if that takes milliseconds; look for a model that no replica is known to serve."""
    state, route = exchange.state, exchange.route
    started = perf_counter()
    check_media_type(exchange.headers)
    fields = read_quick_fields(route, body, state.routing.fingerprinter)
    if fields is None:
        fields = await state.routing.body_workers.read(route, body)
    fields.exact = await count_tokens(state.routing, route, fields)
    fields.prompt = None  # as large as the body, and needed no more
    exchange.record.decision_s = perf_counter() - started
    request = _parse_now(exchange, body, fields)
    model = request.route.model
    if (
        model is None
        or state.routing.router.view.lists(model)
        or not await state.routing.models.find_missing(model, now=state.routing.clock())
    ):
        return request
    return _parse_now(exchange, body, fields)


def _parse_now(exchange: Exchange, body: bytes, fields: BodyFields) -> ParsedRequest:
    assert exchange.router_id is not None
    started = perf_counter()
    request = parse_request(
        exchange.state.routing,
        exchange.state.replicas.stored_responses,
        exchange.route,
        exchange.headers,
        body,
        fields,
        request_id=exchange.router_id,
        received_s=exchange.received_s,
        client=exchange.client,
    )
    exchange.record.decision_s += perf_counter() - started
    return request


async def _serve(exchange: Exchange, request: ParsedRequest) -> None:
    """Have the Router decide, and run attempts until the request has ended. Raises `HttpError`."""
    state = exchange.state
    started = perf_counter()
    action = state.routing.gateway.submit(request.route)
    state.telemetry.metrics.decided(exchange.record.decision_s + perf_counter() - started)
    step: NextStep | None
    if isinstance(action, Hold):
        step = await exchange.wait_in_queue(request.route.request_id)
    else:
        step = exchange.lease(action) if isinstance(action, Dispatch) else action
    while isinstance(step, Lease):
        step = await exchange.next(step)
    if isinstance(step, Forward):
        await exchange.forward()
    elif step is not None:
        raise error_for(state.routing, step, request)


async def _wait_for_disconnect(exchange: Exchange) -> None:
    """Cancel the exchange as soon as the client disconnects."""
    while (await exchange.receive())["type"] != "http.disconnect":
        pass
    exchange.client_disconnected()
