"""The regional proxy as a process: its data listener serves clients.

Owns the listener's table of routes, the small GET responses, the lists of models, and CORS. Leaves requests for a
replica to `gorgo.proxy.exchange`, and the life of the process to `gorgo.live.process`.

At the first signal new requests are rejected; open ones may finish within the grace period, then they end with an
error.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable, Collection, Mapping
from time import perf_counter
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router

from gorgo.config.model import Config, CorsConfig
from gorgo.core.messages.actions import Dispatch, Forward, Hold
from gorgo.live.http.body import ClientDisconnected, body_limit, draining, read_body, take_whole_body
from gorgo.live.http.errors import HttpError, Message, Receive, Send, send_error, send_json, unknown_route
from gorgo.live.http.headers import Header, find, has_body, upstream_headers
from gorgo.live.http.tls import follow_files
from gorgo.live.listener.sockets import address_of, listening
from gorgo.live.logs import log_failure
from gorgo.live.openapi import client_document
from gorgo.live.parsing.json_body import BodyFields, check_media_type, read_quick_fields
from gorgo.live.process import ProcessOptions, Ready, accept_limits, end_exchanges, run_process, serve_asgi
from gorgo.live.request.parse import (
    INFERENCE_ROUTES,
    ParsedRequest,
    count_tokens,
    find_model,
    has_tokens,
    parse_request,
)
from gorgo.live.request.record import (
    ALIVE,
    check_method,
    check_open,
    count_own_answer,
    error_for,
    internal_error,
    model_list,
    model_row,
    readiness,
    record_early_refusal,
)
from gorgo.live.state import LiveState
from gorgo.live.upstream.client import UpstreamError
from gorgo.proxy.exchange.exchange import Exchange, Lease, NextStep

# A request from its first byte to its last: read, route, attempt until a response is complete, record.
#
# Theory of operation: one task per exchange, the server's own. A second, small one waits for the client to disconnect
# and cancels the first, where the listener does not call at a disconnect.


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
        exchange.release_answer()
        record.close(
            exchange.route,
            exchange.id,
            sent_status=response.writer.status,
            disconnected=response.disconnected and not response.had_end,
        )


async def _read(exchange: Exchange) -> ParsedRequest:
    state = exchange.state
    check_method(exchange.method)
    check_open(state, open_requests=len(state.exchanges))
    take = exchange.extensions.get("gorgo.take_body")
    body = await _read_body(exchange) if take is None else _take_body(exchange, take)
    exchange.record.body_read()
    exchange.router_id = state.routing.gateway.register(exchange.id, exchange)
    exchange.request = exchange.record.request = request = await _parse(exchange, body)
    return request


def _take_body(exchange: Exchange, take: Callable[[], bytes]) -> bytes:
    """Take a body that has come whole out of the connection, which would hold it for as long as the response takes."""
    exchange.state.routing.uploads.check(exchange.client)
    return take_whole_body(take(), limits=exchange.state.limits, buffer=exchange.buffer)


async def _read_body(exchange: Exchange) -> bytes:
    with exchange.state.routing.uploads.track(exchange.client):
        limits = exchange.state.limits
        return await read_body(exchange.receive, exchange.headers, limits=limits, buffer=exchange.buffer)


async def _parse(exchange: Exchange, body: bytes) -> ParsedRequest:
    """Unpack and parse the body, here if that is quick; look for a model that no replica is known to serve."""
    state, route = exchange.state, exchange.route
    started = perf_counter()
    coding = check_media_type(exchange.headers)
    if coding is not None:
        limit = body_limit(state.limits, exchange.buffer)
        body = await state.routing.body_workers.unpack(coding, body, limit=limit, client=exchange.buffer.client)
        exchange.buffer.reserve_body(len(body))
    fields = read_quick_fields(route, body, state.routing.fingerprinter)
    if fields is None:
        fields = await state.routing.body_workers.read(route, body, client=exchange.buffer.client)
    if has_tokens(state.routing, fields):
        fields.exact = await count_tokens(state.routing, route, fields)
    fields.prompt = None  # as large as the body, and needed no more
    exchange.record.decision_s = perf_counter() - started
    request = _parse_now(exchange, body, fields)
    if state.routing.router.view.lists(request.route.model):
        return request
    return _parse_now(exchange, body, fields) if await find_model(state.routing, request.route.model) else request


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
        step = await exchange.attempt(step)
        if exchange.has_hedge or exchange.has_broken:
            step = await exchange.settle_step(step)
    if isinstance(step, Forward):
        await exchange.forward()
    elif step is not None:
        raise error_for(state.routing, step, request)


async def _wait_for_disconnect(exchange: Exchange) -> None:
    """Cancel the exchange as soon as the client disconnects."""
    while (await exchange.receive())["type"] != "http.disconnect":
        pass
    exchange.client_disconnected()


# `GET /v1/models` and `GET /v1/models/{model}`: known models, or a replica's own list where none is known.


#: After this the next replica is asked for its models.
_MODELS_TIMEOUT_S = 5.0
#: A list of ten thousand models; one is stored for each of 64 keys.
MAX_LIST_BYTES = 1024 * 1024
#: Headers with which a replica's list of models could be partial, encoded or a 304.
_NEGOTIATION = (b"accept", b"if-", b"range")


async def models(state: LiveState, scope: Message, send: Send) -> None:
    """Return the models of regions.yaml and those that replicas list; a replica's own answer without any."""
    count_own_answer(state.routing, state.telemetry, scope.get("gorgo.client"))
    rows = state.routing.models.rows()
    if rows:
        await send_json(send, 200, model_list(rows))
        return
    await send_json(send, 200, await _list(state, scope))


async def model(state: LiveState, scope: Message, send: Send) -> None:
    """Return one row of the list; its id may have slashes. Raises `HttpError` (404) with the models that there are."""
    count_own_answer(state.routing, state.telemetry, scope.get("gorgo.client"))
    name = scope["path_params"]["model"]
    rows = state.routing.models.rows() or _rows(await _list(state, scope))
    await send_json(send, 200, model_row(state.routing, rows, name, client=scope.get("gorgo.client")))


def _rows(body: bytes) -> list[dict[str, Any]]:
    """Return the rows of a replica's list; none if it is damaged."""
    try:
        data = json.loads(body)["data"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return []
    return [entry for entry in data if isinstance(entry, dict)] if isinstance(data, list) else []


async def _list(state: LiveState, scope: Message) -> bytes:
    return await state.replicas.model_lists.get(scope["headers"], lambda: _fetch_models(state, scope))


async def _fetch_models(state: LiveState, scope: Message) -> bytes:
    views = sorted(state.routing.router.view.snapshots(now=state.routing.clock()), key=lambda view: not view.eligible)
    for view in views:
        target = state.replicas.targets.get(view.name)
        if target is None:
            continue  # removed while another replica was asked
        passed = upstream_headers(
            scope["headers"], request_id="models", api_key=target.api_key, passed=state.passed_headers
        )
        headers = [pair for pair in passed if not pair[0].startswith(_NEGOTIATION)]
        target.acquire()
        try:
            status, body = await target.upstream.fetch("/v1/models", headers, timeout_s=_MODELS_TIMEOUT_S)
        except UpstreamError:
            continue
        finally:
            target.release()
        if status == 200 and len(body) <= MAX_LIST_BYTES:
            return body
    raise HttpError(503, "no_replica", "no replica could list its models")


# CORS for browsers: answers to preflight requests, and the headers of all other responses.
#
# Preflights are Starlette's. Its `send` is not used: it is a coroutine per event, and a wrapped `send` would turn off
# the direct writes of a stream.


#: Headers that scripts may read beside those that browsers always show.
EXPOSED = (
    *("retry-after", "x-request-id", "x-gorgo-replica", "x-gorgo-region", "x-gorgo-policy"),
    *("x-gorgo-weights-version", "x-gorgo-predicted-ttft-ms", "x-gorgo-estimated-cached-tokens"),
)
#: A browser repeats a preflight after this; Chromium allows two hours at most.
MAX_AGE_S = 600


class CorsSend:
    """An ASGI `send` that adds headers to the head of a response. It is no coroutine and changes no body."""

    __slots__ = ("_headers", "wrapped")

    def __init__(self, wrapped: Send, headers: list[Header]) -> None:
        self.wrapped = wrapped
        self._headers = headers

    def __call__(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *self._headers]}
        return self.wrapped(message)


class Cors:
    """The rules of one configuration."""

    def __init__(self, config: CorsConfig) -> None:
        self.config = config
        self._starlette = CORSMiddleware(
            Router(),  # never called: other requests pass by
            allow_origins=config.allow_origins,
            allow_methods=("GET", "POST"),
            # A browser asks for what a client library sets; no cookie is involved.
            allow_headers=("*",),
            max_age=MAX_AGE_S,
        )
        self._exposed = (b"access-control-expose-headers", ", ".join(EXPOSED).encode())

    async def preflight(self, scope: Message, receive: Receive, send: Send) -> bool:
        """Answer a preflight request, which has no key; return whether it was one."""
        headers = Headers(scope=scope)
        if scope["method"] != "OPTIONS" or not {"origin", "access-control-request-method"} <= set(headers.keys()):
            return False
        response = self._starlette.preflight_response(headers)
        async with draining(receive):
            await response(scope, receive, send)
        return True

    def wrap(self, scope: Message, send: Send) -> Send:
        """Return a `send` with the headers for the request's origin."""
        origin = find(scope["headers"], b"origin")
        if self._starlette.allow_all_origins:
            return send if origin is None else CorsSend(send, [(b"access-control-allow-origin", b"*"), self._exposed])
        # For caches: another origin gets another answer.
        headers: list[Header] = [(b"vary", b"Origin")]
        if origin is not None and self._starlette.is_allowed_origin(origin.decode("latin-1")):
            headers += [(b"access-control-allow-origin", origin), self._exposed]
        return CorsSend(send, headers)


# The routes of the data listener are Starlette's router without middleware, which would cost every event.


#: For load balancers, Prometheus and generators of clients: no client's key is required.
PUBLIC_ROUTES = ("/health", "/healthz", "/livez", "/ready", "/readyz", "/metrics", "/openapi.json")
#: Names of models in the path, percent-encoded by some clients.
_MODELS_PREFIX = b"/v1/models/"

Responder = Callable[[LiveState, Message, Send], Awaitable[None]]
Endpoint = Callable[[Message, Receive, Send], Awaitable[None]]


class GetEndpoint:
    """An ASGI app for one GET response of the proxy's own. For HEAD the server drops the body."""

    def __init__(self, state: LiveState, respond: Responder) -> None:
        self._state = state
        self._respond = respond

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["method"] not in ("GET", "HEAD"):
            allow = ((b"allow", b"GET, HEAD"),)
            async with draining(receive):
                await send_error(send, HttpError(405, "method_not_allowed", "expected GET", headers=allow))
            return
        if not has_body(scope["headers"]):
            await self._answer(scope, send)
            return
        # Unread, a megabyte of it would wait in the connection and in the sockets for as long as the response takes.
        async with draining(receive):
            await self._answer(scope, send)

    async def _answer(self, scope: Message, send: Send) -> None:
        try:
            await self._respond(self._state, scope, send)
        except HttpError as error:
            await send_error(send, error)


async def health(state: LiveState, scope: Message, send: Send) -> None:  # noqa: ARG001
    """Return 200 while the process is alive, whatever the state of replicas."""
    await send_json(send, 200, ALIVE)


async def ready(state: LiveState, scope: Message, send: Send) -> None:  # noqa: ARG001
    """Return 200 if a load balancer should send requests here."""
    await send_json(send, 200, readiness(state))


async def metrics(state: LiveState, scope: Message, send: Send) -> None:  # noqa: ARG001
    """Return the metrics, unless the admin listener alone has them."""
    if state.config.proxy.metrics_listener != "data":
        raise HttpError(404, "not_found", "the admin listener has the metrics")
    body = await state.exposition()
    headers = [(b"content-type", CONTENT_TYPE_LATEST.encode()), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def description(state: LiveState, scope: Message, send: Send) -> None:  # noqa: ARG001
    """Return the OpenAPI document of this listener."""
    await send_json(send, 200, await asyncio.to_thread(client_document))


class DataRouter(Router):
    """The table of routes behind two checks of every request: a plain path, and a client's key where one is required.

    A route has one spelling. Percent signs would allow others, which a filter of paths before the proxy does not know;
    they are accepted in the name of a model alone.
    """

    def __init__(
        self, state: LiveState, routes: list[Route], open_paths: Collection[str], *, finds_by_path: bool = True
    ) -> None:
        super().__init__(routes, redirect_slashes=False, default=self._not_found)
        self._state = state
        self._open_paths = frozenset(open_paths)
        self._cors: Cors | None = None
        #: Endpoints of paths without a parameter, found without a search of the table.
        self._endpoints: Mapping[str, Endpoint] = {
            route.path: route.app for route in routes if finds_by_path and "{" not in route.path
        }

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        cors = self._state.config.proxy.cors
        if cors.allow_origins:
            rules = self._cors_rules(cors)
            if await rules.preflight(scope, receive, send):
                return
            send = rules.wrap(scope, send)
        try:
            self._admit(scope)
        except HttpError as error:
            record_early_refusal(self._state.telemetry, error)
            async with draining(receive):
                await send_error(send, error, path=scope["path"])
            return
        endpoint = self._endpoints.get(scope["path"]) or super().__call__
        await endpoint(scope, receive, send)

    def _admit(self, scope: Message) -> None:
        if b"%" in scope["raw_path"] and not scope["raw_path"].startswith(_MODELS_PREFIX):
            raise HttpError(404, "not_found", "no such route; expected a path without percent signs")
        keys = self._state.routing.client_keys
        if keys is not None and scope["path"] not in self._open_paths:
            # The key was for the proxy: it is removed from the headers.
            scope["gorgo.client"], scope["headers"] = keys.admit(scope["headers"])

    def _cors_rules(self, config: CorsConfig) -> Cors:
        """Return the rules of the configuration in force, made once per configuration."""
        if self._cors is None or self._cors.config is not config:
            self._cors = Cors(config)
        return self._cors

    async def _not_found(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close"})
            return
        async with draining(receive):
            await send_error(send, unknown_route(scope["path"], self.routes), path=scope["path"])


def data_app(state: LiveState, *, plain: bool = False) -> Any:
    """Return the ASGI app of the data listener. `plain`: Starlette's router finds every endpoint."""
    routes = [Route(path, InferenceEndpoint(state, path)) for path in INFERENCE_ROUTES]
    small = {
        "/health": health,
        "/healthz": health,
        "/livez": health,
        "/ready": ready,
        "/readyz": ready,
        "/metrics": metrics,
        "/v1/models": models,
        "/v1/models/{model:path}": model,
        "/openapi.json": description,
    }
    routes += [Route(path, GetEndpoint(state, respond)) for path, respond in small.items()]
    return DataRouter(state, routes, PUBLIC_ROUTES, finds_by_path=not plain)


async def serve(
    config: Config,
    options: ProcessOptions,
    *,
    ready: Ready | None = None,
    shutdown: asyncio.Event | None = None,
) -> None:
    """Run the proxy until `shutdown` or a signal. Parameters and errors as of `run_process`."""
    link = options.link
    bound = listening(config.proxy.bind, "proxy.bind") if link is None else link.listener(link.start.data)
    with bound as data:
        await run_process(config, options, lambda live: HttpFrontEnd(live, data), ready=ready, shutdown=shutdown)


class HttpFrontEnd:
    """The data listener of a proxy."""

    def __init__(self, live: LiveState, listener: socket.socket) -> None:
        self.address = address_of(listener)
        self._live = live
        self._listener = listener

    async def start(self) -> None:
        """Do nothing: the socket listens already."""

    async def serve_requests(self, closing: asyncio.Event) -> None:
        """Serve clients until `closing` is set."""
        live = self._live
        served, app, limits, shared = live.served_tls, data_app(live, plain=live.plain), accept_limits(live), None
        if live.link is not None and not live.plain:
            from gorgo.live.listener.listener import SharedListener

            shared = SharedListener(live.link.counts, live.link.retiring)
        if served is None:
            await serve_asgi(app, self._listener, closing, limits, plain=live.plain, shared=shared)
            return
        renewing = asyncio.create_task(follow_files(served, lambda: live.config.proxy.tls))
        try:
            await serve_asgi(app, self._listener, closing, limits, served.context, plain=live.plain, shared=shared)
        finally:
            renewing.cancel()

    async def end_exchanges(self, stop_now: asyncio.Event) -> None:
        """End all exchanges, after the grace period at the latest."""
        await end_exchanges(self._live, stop_now)
