"""The admin listener: what operators and tuners read and set. Its own port, and a token on every call.

Owns the routes, their inputs and their errors; everything they do is one call of the Router.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gorgo.core.weights import Weights
from gorgo.errors import UnknownPolicy, UnknownReplica, WeightsError
from gorgo.policies.registry import make_policy
from gorgo.proxy.errors import HttpError, error_json
from gorgo.proxy.logs import log
from gorgo.proxy.state import ProxyState

TOKEN_VARIABLE = "GORGO_ADMIN_TOKEN"
#: Samples per answer; a reader that lags asks again.
MAX_SAMPLES = 1000
#: Weights and names are short; more is not an admin call.
MAX_BODY_BYTES = 64 * 1024

Handler = Callable[[Request], Awaitable[Response]]


class Admin:
    """The handlers, over one running proxy."""

    def __init__(self, state: ProxyState, token: str | None) -> None:
        self._state = state
        self._token = None if token is None else token.encode()

    def routes(self) -> list[Route]:
        table: list[tuple[str, str, Handler]] = [
            ("GET", "/admin/fleet", self.fleet),
            ("GET", "/admin/weights", self.weights),
            ("PUT", "/admin/weights", self.set_weights),
            ("GET", "/admin/policy", self.policy),
            ("PUT", "/admin/policy", self.set_policy),
            ("GET", "/admin/samples", self.samples),
            ("GET", "/admin/decisions/{request_id:path}", self.decisions),
            ("POST", "/admin/replicas/{name}/drain", self.drain),
            ("POST", "/admin/flush", self.flush),
        ]
        return [Route(path, self._guarded(handler), methods=[method]) for method, path, handler in table]

    async def fleet(self, request: Request) -> Response:  # noqa: ARG002 - a handler's signature
        views = self._state.router.fleet_view(now=self._state.clock())
        return _json(
            {
                "boot_id": self._state.router.boot_id,
                "region": self._state.config.proxy.region,
                "in_flight": self._state.router.in_flight,
                "stopping": self._state.stopping,
                "replicas": [view.as_dict() | {"reports": self._reports(view.name)} for view in views],
            }
        )

    def _reports(self, replica: str) -> Mapping[str, str]:
        return self._state.targets[replica].reports.as_dict()

    async def weights(self, request: Request) -> Response:  # noqa: ARG002 - a handler's signature
        return self._weights(self._state.router.weights)

    async def set_weights(self, request: Request) -> Response:
        values = _values(await _body(request), required=True)
        weights = self._state.router.set_weights(values, now=self._state.clock())
        log("weights_set", policy=self._state.router.policy.name, version=weights.version, weights=dict(weights))
        return self._weights(weights)

    async def policy(self, request: Request) -> Response:  # noqa: ARG002 - a handler's signature
        return self._policy()

    async def set_policy(self, request: Request) -> Response:
        body = await _body(request)
        name = body.get("policy")
        if not isinstance(name, str):
            raise HttpError(400, "invalid_request", 'expected {"policy": NAME, "weights": {NAME: NUMBER}?}')
        values = _values(body, required=False)
        weights = self._state.router.set_policy(make_policy(name), values, now=self._state.clock())
        log("policy_set", policy=name, version=weights.version, weights=dict(weights))
        return self._policy()

    async def samples(self, request: Request) -> Response:
        after = _count(request, "after", 0)
        limit = min(_count(request, "limit", MAX_SAMPLES), MAX_SAMPLES)
        return _json(self._state.router.samples.after(after, limit))

    async def decisions(self, request: Request) -> Response:
        request_id = request.path_params["request_id"]
        found = self._state.router.decisions(request_id)
        if not found:
            raise HttpError(404, "decision_not_found", "no decision for that request id is kept any more")
        return _json({"request_id": request_id, "decisions": [decision.as_dict() for decision in found]})

    async def drain(self, request: Request) -> Response:
        name = request.path_params["name"]
        draining = (await _body(request)).get("drain", True)
        if not isinstance(draining, bool):
            raise HttpError(400, "invalid_request", 'expected {"drain": true} or {"drain": false}')
        self._state.router.drain(name, draining, now=self._state.clock())
        log("drain_set", replica=name, drain=draining)
        return _json({"replica": name, "drain": draining})

    async def flush(self, request: Request) -> Response:
        replica = (await _body(request)).get("replica")
        if replica is not None and not isinstance(replica, str):
            raise HttpError(400, "invalid_request", 'expected {"replica": NAME} or no body')
        self._state.router.flush(replica, now=self._state.clock())
        log("index_flushed", replica=replica)
        return _json({"replica": replica, "flushed": True})

    def _weights(self, weights: Weights) -> Response:
        specs = {spec.name: spec for spec in self._state.router.policy.weight_specs}
        return _json(
            {
                "policy": self._state.router.policy.name,
                "version": weights.version,
                "weights": dict(weights),
                "boxes": {name: [spec.low, spec.high] for name, spec in specs.items()},
            }
        )

    def _policy(self) -> Response:
        policy, weights = self._state.router.policy, self._state.router.weights
        return _json(
            {
                "policy": policy.name,
                "summary": policy.summary,
                "unit": policy.unit,
                "index": policy.index,
                "version": weights.version,
                "weights": dict(weights),
            }
        )

    def _guarded(self, handler: Handler) -> Handler:
        async def guarded(request: Request) -> Response:
            self._check(request)
            return await handler(request)

        return guarded

    def _check(self, request: Request) -> None:
        """In constant time, and before anything else is looked at."""
        if self._token is None:
            message = f"the admin API is off: start the proxy with a token in {TOKEN_VARIABLE}"
            raise HttpError(401, "admin_off", message, headers=_CHALLENGE)
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self._token):
            message = f"expected Authorization: Bearer and the token in {TOKEN_VARIABLE}"
            raise HttpError(401, "unauthorized", message, headers=_CHALLENGE)


_CHALLENGE = ((b"www-authenticate", b"Bearer"),)


def admin_app(state: ProxyState, token: str | None) -> Starlette:
    """The ASGI app of the admin listener."""
    handlers: dict[Any, Any] = {
        HttpError: _on_http_error,
        HTTPException: _on_routing_error,
        WeightsError: _on_bad_input,
        UnknownPolicy: _on_bad_input,
        UnknownReplica: _on_unknown_replica,
    }
    app = Starlette(routes=Admin(state, token).routes(), exception_handlers=handlers)
    app.router.redirect_slashes = False
    return app


async def _body(request: Request) -> dict[str, Any]:
    """The JSON object of a call; an empty body is an empty object."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise HttpError(413, "request_too_large", f"the body is larger than {MAX_BODY_BYTES} bytes")
    try:
        parsed = json.loads(bytes(body)) if body.strip() else {}
    except (ValueError, RecursionError):
        raise HttpError(400, "invalid_json", "the body is not JSON") from None
    if not isinstance(parsed, dict):
        raise HttpError(400, "invalid_json", "expected a JSON object as the body")
    return parsed


def _values(body: Mapping[str, Any], *, required: bool) -> dict[str, float]:
    values = body.get("weights", None if required else {})
    if not isinstance(values, dict) or not all(_is_number(value) for value in values.values()):
        raise HttpError(400, "invalid_request", 'expected {"weights": {NAME: NUMBER}}')
    return {name: float(value) for name, value in values.items()}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _count(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise HttpError(400, "invalid_request", f"{name}: expected a whole number")
    return int(text)


def _json(value: object, status: int = 200) -> Response:
    return Response(json.dumps(value), status, media_type="application/json")


def _error(error: HttpError) -> Response:
    headers = {name.decode(): value.decode() for name, value in error.headers}
    body = error_json(error.status, error.code, error.message)
    return Response(body, error.status, headers, media_type="application/json")


async def _on_http_error(request: Request, error: Exception) -> Response:  # noqa: ARG001 - Starlette's signature
    assert isinstance(error, HttpError)
    return _error(error)


async def _on_bad_input(request: Request, error: Exception) -> Response:  # noqa: ARG001 - Starlette's signature
    return _error(HttpError(400, "invalid_request", str(error)))


async def _on_unknown_replica(request: Request, error: Exception) -> Response:  # noqa: ARG001 - Starlette's signature
    return _error(HttpError(404, "replica_not_found", str(error)))


async def _on_routing_error(request: Request, error: Exception) -> Response:  # noqa: ARG001 - Starlette's signature
    assert isinstance(error, HTTPException)
    allow = (error.headers or {}).get("Allow")
    if error.status_code == 405 and allow:
        return _error(HttpError(405, "method_not_allowed", f"expected {allow}", headers=((b"allow", allow.encode()),)))
    return _error(HttpError(error.status_code, "not_found", "there is no such route"))
