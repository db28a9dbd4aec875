"""The routes of the data listener: Starlette's router without middleware, which would cost every event.

Owns the table of routes and the small GET responses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.routing import Route, Router

from gorgo.config.model import CorsConfig
from gorgo.live.http.body import draining
from gorgo.live.http.errors import HttpError, Message, Receive, Send, send_error, send_json
from gorgo.live.http.headers import has_body
from gorgo.live.http.unknown_route import unknown_route
from gorgo.live.openapi.documents import client_document
from gorgo.live.request.own_answers import ALIVE, readiness
from gorgo.live.request.refusals import record_early_refusal
from gorgo.live.request.routes import INFERENCE_ROUTES
from gorgo.live.state import LiveState
from gorgo.proxy.exchange.handler import InferenceEndpoint
from gorgo.proxy.http.cors import Cors
from gorgo.proxy.model_routes import model, models

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
    body = state.telemetry.metrics.exposition()
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

    def __init__(self, state: LiveState, routes: list[Route], open_paths: Collection[str]) -> None:
        super().__init__(routes, redirect_slashes=False, default=self._not_found)
        self._state = state
        self._open_paths = frozenset(open_paths)
        self._cors: Cors | None = None
        #: Endpoints of paths without a parameter, found without a search of the table.
        self._endpoints: Mapping[str, Endpoint] = {route.path: route.app for route in routes if "{" not in route.path}

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
        await self._endpoints.get(scope["path"], super().__call__)(scope, receive, send)

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


def data_app(state: LiveState) -> Any:
    """Return the ASGI app of the data listener."""
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
    return DataRouter(state, routes, PUBLIC_ROUTES)
