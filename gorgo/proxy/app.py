"""The routes of the data listener: Starlette's router without middleware, which would cost every event.

Owns the table of routes and the small GET responses.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.routing import Route, Router

from gorgo.proxy.exchange.handler import InferenceEndpoint
from gorgo.proxy.http.body import draining
from gorgo.proxy.http.errors import HttpError, Message, Receive, Send, send_error, send_json
from gorgo.proxy.http.headers import upstream_headers
from gorgo.proxy.http.unknown_route import unknown_route
from gorgo.proxy.logs import log
from gorgo.proxy.openapi.documents import client_document
from gorgo.proxy.readiness import why_not_ready
from gorgo.proxy.state import RunningProxy
from gorgo.proxy.upstream.client import UpstreamError

#: Routes that carry a prompt.
INFERENCE_ROUTES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/generate",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
)
#: For load balancers, Prometheus and generators of clients: no client's key is required.
PUBLIC_ROUTES = ("/health", "/ready", "/metrics", "/openapi.json")
#: After this the next replica is asked for its models.
_MODELS_TIMEOUT_S = 5.0

#: Headers with which a replica's list of models could be partial, encoded or a 304.
_NEGOTIATION = (b"accept", b"if-", b"range")

Responder = Callable[[RunningProxy, Message, Send], Awaitable[None]]


class GetEndpoint:
    """An ASGI app for one GET response of the proxy's own. For HEAD the server drops the body."""

    def __init__(self, state: RunningProxy, respond: Responder) -> None:
        self._state = state
        self._respond = respond

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["method"] not in ("GET", "HEAD"):
            allow = ((b"allow", b"GET, HEAD"),)
            async with draining(receive):
                await send_error(send, HttpError(405, "method_not_allowed", "expected GET", headers=allow))
            return
        try:
            await self._respond(self._state, scope, send)
        except HttpError as error:
            await send_error(send, error)


async def health(state: RunningProxy, scope: Message, send: Send) -> None:  # noqa: ARG001
    """Return 200 while the process is alive, whatever the state of replicas."""
    await send_json(send, 200, b'{"status": "ok"}')


async def ready(state: RunningProxy, scope: Message, send: Send) -> None:  # noqa: ARG001
    """Return 200 if a load balancer should send requests here."""
    if state.stopping:
        raise HttpError(503, "stopping", "this proxy is stopping")
    views = state.router.fleet_view(now=state.clock())
    required = state.config.proxy.min_ready_replicas
    missing = why_not_ready(views, state.client_policies.models, required=required)
    if missing is not None:
        raise HttpError(503, *missing)
    await send_json(send, 200, b'{"status": "ready"}')


async def metrics(state: RunningProxy, scope: Message, send: Send) -> None:  # noqa: ARG001
    body = state.metrics.exposition()
    headers = [(b"content-type", CONTENT_TYPE_LATEST.encode()), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def models(state: RunningProxy, scope: Message, send: Send) -> None:
    """Return the models of regions.yaml and those that replicas list; a replica's own answer without any."""
    rows = state.models.rows()
    if rows:
        await send_json(send, 200, json.dumps({"object": "list", "data": rows}).encode())
        return
    await send_json(send, 200, await _fetch_models(state, scope))


async def _fetch_models(state: RunningProxy, scope: Message) -> bytes:
    views = sorted(state.router.fleet_view(now=state.clock()), key=lambda view: not view.eligible)
    for view in views:
        target = state.targets.get(view.name)
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
        if status == 200:
            return body
    raise HttpError(503, "no_replica", "no replica could list its models")


async def description(state: RunningProxy, scope: Message, send: Send) -> None:  # noqa: ARG001
    """Return the OpenAPI document of this listener."""
    await send_json(send, 200, await asyncio.to_thread(client_document))


class DataRouter(Router):
    """The table of routes behind two checks of every request: a plain path, and a client's key where one is required.

    A route has one spelling. Percent signs would allow others, which a filter of paths before the proxy does not know.
    """

    def __init__(self, state: RunningProxy, routes: list[Route], open_paths: Collection[str]) -> None:
        super().__init__(routes, redirect_slashes=False, default=self._not_found)
        self._state = state
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._admit(scope)
            except HttpError as error:
                self._state.metrics.rejected(error.code)
                log("request_refused", status=error.status, code=error.code)
                async with draining(receive):
                    await send_error(send, error)
                return
        await super().__call__(scope, receive, send)

    def _admit(self, scope: Message) -> None:
        if b"%" in scope["raw_path"]:
            raise HttpError(404, "not_found", "no such route; expected a path without percent signs")
        keys = self._state.client_keys
        if keys is not None and scope["path"] not in self._open_paths:
            # The key was for the proxy: it is removed from the headers.
            scope["gorgo.client"], scope["headers"] = keys.admit(scope["headers"])

    async def _not_found(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close"})
            return
        async with draining(receive):
            await send_error(send, unknown_route(scope["path"], self.routes))


def data_app(state: RunningProxy) -> Any:
    """Return the ASGI app of the data listener."""
    routes = [Route(path, InferenceEndpoint(state, path)) for path in INFERENCE_ROUTES]
    small = {
        "/health": health,
        "/ready": ready,
        "/metrics": metrics,
        "/v1/models": models,
        "/openapi.json": description,
    }
    routes += [Route(path, GetEndpoint(state, respond)) for path, respond in small.items()]
    return DataRouter(state, routes, PUBLIC_ROUTES)
