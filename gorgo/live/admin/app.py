"""The admin listener: routes, authentication, errors and the read-only calls. Every call needs a token.

Owns the app (`admin_app`), and the check of all invariants (`self_check`). Leaves changes and pushes to `admin.routes`,
and the status page to `admin.page`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from hmac import compare_digest
from typing import TYPE_CHECKING, Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gorgo.core.fleet.snapshot import ReplicaSnapshot
from gorgo.errors import (
    ConfigError,
    GorgoError,
    MissingExtra,
    ReplicaInFile,
    StateError,
    TooManyReplicas,
    UnknownPolicy,
    UnknownReplica,
    VersionConflict,
    WeightsError,
    WeightsFrozen,
)
from gorgo.live.admin.calls import (
    CHALLENGE,
    Check,
    NoAnswer,
    TokenCheck,
    bearer,
    count_of,
    is_text,
    json_response,
    parse_body,
    read_body,
)
from gorgo.live.admin.page.routes import Page
from gorgo.live.admin.page.snapshot import loads_of_others, with_others
from gorgo.live.admin.routes import ControlRoutes, DecisionRoutes, FleetRoutes, PushRoutes
from gorgo.live.control.transactions import FleetChanges
from gorgo.live.event_loop import ahead_s
from gorgo.live.http.errors import HttpError, error_json, unknown_route
from gorgo.live.logs import log
from gorgo.live.openapi import admin_document
from gorgo.live.state import INTERNAL_VARIABLE, LiveState

if TYPE_CHECKING:
    from gorgo.core.limits import BufferBudget
    from gorgo.core.router import Router
    from gorgo.live.state import LiveState


# The answer of `GET /admin/check`: every invariant of the Router, and a count of open resources.
#
# It visits the whole prefix index in one step of the event loop, so it is off unless the process has
# `GORGO_INTERNAL_ROUTES=1`.


def self_check(state: LiveState) -> dict[str, Any]:
    """Return open resources and the first violated invariant, `None` if all hold."""
    router = state.routing.router
    return {
        "violation": _violation(router, state.buffers),
        "index": {"blocks": router.index.stored_blocks, "nodes": router.index.nodes},
        "in_flight": router.in_flight,
        "queued": router.queued,
        "exchanges": len(state.exchanges),
        "buffered_bytes": state.buffers.used_bytes,
        "buffers": len(state.buffers),
        "draining": len(state.replicas.draining_targets),
        "active": {name: target.active for name, target in state.replicas.targets.items()},
        "open_responses": {name: target.upstream.open_responses for name, target in state.replicas.targets.items()},
        "connections": {name: target.upstream.connections for name, target in state.replicas.targets.items()},
        "tasks": dict(Counter(_name(task) for task in asyncio.all_tasks())),
    }


def _violation(router: Router, buffers: BufferBudget) -> str | None:
    try:
        router.check()
        buffers.check()
    except AssertionError as broken:
        return str(broken) or _place(broken)
    return None


def _place(broken: AssertionError) -> str:
    """Return the place of an assertion without a message."""
    at = broken.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return "an assertion" if at is None else f"{at.tb_frame.f_code.co_qualname}, line {at.tb_lineno}"


def _name(task: asyncio.Task[Any]) -> str:
    """Return the name of the coroutine, equal for all tasks of one kind."""
    return getattr(task.get_coro(), "__qualname__", "unknown")


TOKEN_VARIABLE = "GORGO_ADMIN_TOKEN"
#: Samples per response; a slow reader requests the next page.
MAX_SAMPLES = 1000

Handler = Callable[[Request], Awaitable[Response]]

_FLUSH: dict[str, tuple[Check, str]] = {"replica": (is_text, "the name of a replica; default: all")}


class Admin:
    """The handlers of one running proxy. `closing` ends event streams, `metrics_token` is good for metrics alone."""

    def __init__(
        self,
        state: LiveState,
        changes: FleetChanges,
        token: str | None,
        closing: asyncio.Event,
        *,
        metrics_token: str | None = None,
    ) -> None:
        self._state = state
        self._metrics_token = None if metrics_token is None else metrics_token.encode()
        self._token = TokenCheck(token, lambda: state.routing.clock(), lambda: state.telemetry.metrics.admin_refused())
        self._control = ControlRoutes(state.routing)
        self._decisions = DecisionRoutes(state.routing)
        self._fleet = FleetRoutes(state, changes)
        self._pushes = PushRoutes(state.routing, state.replicas, self._token)
        self._page = Page(state, self._token, self._check, closing)

    def routes(self) -> list[Route]:
        control, decisions, fleet = self._control, self._decisions, self._fleet
        table: list[tuple[str, str, Handler]] = [
            ("GET", "/admin/fleet", self.fleet),
            ("GET", "/admin/weights", control.weights),
            ("PUT", "/admin/weights", control.set_weights),
            ("GET", "/admin/policy", control.policy),
            ("PUT", "/admin/policy", control.set_policy),
            ("GET", "/admin/model", self.model),
            ("POST", "/admin/freeze", control.freeze),
            ("POST", "/admin/unfreeze", control.unfreeze),
            ("GET", "/admin/samples", self.samples),
            ("GET", "/admin/decisions", decisions.newest),
            ("GET", "/admin/decisions/{request_id:path}", decisions.of_request),
            ("POST", "/admin/replicas", fleet.register),
            ("DELETE", "/admin/replicas/{name}", fleet.remove),
            ("POST", "/admin/replicas/{name}/drain", fleet.drain),
            ("POST", "/admin/flush", self.flush),
            ("POST", "/admin/reload", fleet.reload),
            ("GET", "/admin/check", self.check),
            ("GET", "/admin/openapi.json", self.description),
        ]
        calls = [Route(path, self._guarded(handler), methods=[method]) for method, path, handler in table]
        pushes = [
            Route("/internal/eviction", self._pushes.eviction, methods=["POST"]),
            Route("/internal/sync", self._pushes.sync, methods=["POST"]),
        ]
        metrics = Route("/metrics", self.guarded_metrics, methods=["GET"])
        return [*calls, metrics, *pushes, *self._page.routes()]

    async def fleet(self, request: Request) -> Response:  # noqa: ARG002 - a handler's signature
        others = await loads_of_others(self._state)
        views = [
            with_others(view, others)
            for view in self._state.routing.router.view.snapshots(now=self._state.routing.clock())
        ]
        caches = {name: state.as_dict() for name, state in self._state.cache_states().items()}
        return json_response(
            {
                "boot_id": self._state.routing.router.boot_id,
                "region": self._state.config.proxy.region,
                "in_flight": self._state.routing.router.in_flight + sum(int(loads[""][0]) for loads in others),
                "stopping": self._state.stopping,
                "routing": self._control.in_force(),
                "fleet_sources": self._state.replicas.found.as_rows(self._state.routing.clock()),
                "replicas": [self._replica(view) | {"cache": caches.get(view.name)} for view in views],
            }
        )

    def _replica(self, view: ReplicaSnapshot) -> dict[str, Any]:
        target = self._state.replicas.targets[view.name]
        more = {
            "registered": view.name in self._state.routing.control.registered,
            "fleet_source": self._state.replicas.found.origin.get(view.name),
            "engine": target.engine,
        }
        return view.as_dict() | more | {"reports": target.reports.as_dict()}

    async def model(self, request: Request) -> Response:  # noqa: ARG002
        return json_response(self._state.routing.training.as_dict())

    async def samples(self, request: Request) -> Response:
        after = count_of(request, "after", 0)
        limit = min(count_of(request, "limit", MAX_SAMPLES), MAX_SAMPLES)
        routing = self._state.routing
        step_s = ahead_s(routing.clock)
        samples = routing.router.samples.after(after, limit, ahead_s=step_s)
        return json_response(samples | {"now_s": routing.clock() + step_s})

    async def flush(self, request: Request) -> Response:
        body = await read_body(request)
        parse_body(body, _FLUSH)
        replica = body.get("replica")
        await self._state.flush(replica)
        log("index_flushed", replica=replica)
        return json_response({"replica": replica, "flushed": True})

    async def check(self, request: Request) -> Response:  # noqa: ARG002
        if not self._state.internal_routes:
            raise HttpError(404, "not_found", f"internal routes are off: start the proxy with {INTERNAL_VARIABLE}=1")
        return json_response(self_check(self._state))

    async def guarded_metrics(self, request: Request) -> Response:
        given = bearer(request.headers)
        token = self._metrics_token
        if token is None or given is None or not compare_digest(given, token):
            await self._check(request)
        return Response(self._state.telemetry.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    async def description(self, request: Request) -> Response:  # noqa: ARG002
        return Response(await asyncio.to_thread(admin_document), media_type="application/json")

    async def on_refused_change(self, request: Request, error: Exception) -> Response:  # noqa: ARG002
        assert isinstance(error, GorgoError)
        return _error(self._control.refusal(error))

    def _guarded(self, handler: Handler) -> Handler:
        async def guarded(request: Request) -> Response:
            await self._check(request)
            return await handler(request)

        return guarded

    async def _check(self, request: Request) -> None:
        """Check the token before the rest of the request. Raises `HttpError` (401)."""
        if self._token.token is None:
            message = f"the admin API is off: start the proxy with a token in {TOKEN_VARIABLE}"
            raise HttpError(401, "admin_off", message, headers=CHALLENGE)
        given = bearer(request.headers)
        if given is None or not self._token.is_right(given):
            if given is not None:
                await self._token.refuse()
            message = f"expected Authorization: Bearer and the token in {TOKEN_VARIABLE}"
            raise HttpError(401, "unauthorized", message, headers=CHALLENGE)


def admin_app(
    state: LiveState,
    changes: FleetChanges,
    token: str | None,
    closing: asyncio.Event,
    *,
    metrics_token: str | None = None,
) -> Starlette:
    """Return the ASGI app of the admin listener."""
    handlers: dict[Any, Any] = {
        HttpError: _on_http_error,
        NoAnswer: _on_no_answer,
        HTTPException: _on_routing_error,
        ConfigError: _on_bad_input,
        WeightsError: _on_bad_input,
        MissingExtra: _on_bad_input,
        UnknownPolicy: _on_bad_input,
        UnknownReplica: _on_unknown_replica,
        ReplicaInFile: _on_conflict,
        TooManyReplicas: _on_conflict,
    }
    admin = Admin(state, changes, token, closing, metrics_token=metrics_token)
    handlers |= dict.fromkeys((WeightsFrozen, VersionConflict, StateError), admin.on_refused_change)
    app = Starlette(routes=admin.routes(), exception_handlers=handlers)
    app.router.redirect_slashes = False
    return app


def _error(error: HttpError) -> Response:
    headers = {name.decode(): value.decode() for name, value in error.headers}
    body = error_json(error.status, error.code, error.message, error.details)
    return Response(body, error.status, headers, media_type="application/json")


async def _on_http_error(request: Request, error: Exception) -> Response:  # noqa: ARG001 - Starlette's signature
    assert isinstance(error, HttpError)
    return _error(error)


async def _on_no_answer(request: Request, error: Exception) -> Response:  # noqa: ARG001 - Starlette's signature
    """End the connection; another server than the own listener ends it behind an answer."""
    abort = request.scope.get("state", {}).get("abort")
    if abort is not None:
        abort()
    return _error(HttpError(401, "unauthorized", "too many wrong tokens", headers=((b"connection", b"close"),)))


async def _on_bad_input(request: Request, error: Exception) -> Response:  # noqa: ARG001 - Starlette's signature
    return _error(HttpError(400, "invalid_request", str(error)))


async def _on_unknown_replica(request: Request, error: Exception) -> Response:  # noqa: ARG001 - Starlette's signature
    return _error(HttpError(404, "replica_not_found", str(error)))


async def _on_conflict(request: Request, error: Exception) -> Response:  # noqa: ARG001 - Starlette's signature
    code = "replica_in_file" if isinstance(error, ReplicaInFile) else "too_many_replicas"
    return _error(HttpError(409, code, str(error)))


async def _on_routing_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    allow = (error.headers or {}).get("Allow")
    if error.status_code == 405 and allow:
        return _error(HttpError(405, "method_not_allowed", f"expected {allow}", headers=((b"allow", allow.encode()),)))
    return _error(unknown_route(request.url.path, request.app.routes))
