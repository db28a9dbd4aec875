"""What an own Envoy's picker answers itself, as the proxy does: health, readiness, known models; and the 404 and 405.

A gateway has routes of its own: there each path goes to a replica.
"""

from __future__ import annotations

import json
from math import ceil

from gorgo.core.record import record
from gorgo.errors import closest
from gorgo.live.http.errors import HttpError
from gorgo.live.request.client_scope import unknown_model
from gorgo.live.request.routes import INFERENCE_ROUTES
from gorgo.picker.protocol.heads import RequestHead
from gorgo.picker.state import PickerState

_ALIVE = frozenset({"/health", "/healthz", "/livez"})
_READY = frozenset({"/ready", "/readyz"})
_MODELS = "/v1/models"
_INFERENCE = frozenset(INFERENCE_ROUTES)


@record
class OwnAnswer:
    """A response of the picker's own, in JSON."""

    status: int
    body: bytes


def public_answer(state: PickerState, head: RequestHead) -> OwnAnswer | None:
    """Return the answer to a load balancer, which needs no key; `None` for any other request. Raises `HttpError`."""
    if head.method not in ("GET", "HEAD"):
        return None
    if head.path in _ALIVE:
        return OwnAnswer(200, b'{"status": "ok"}')
    if head.path not in _READY:
        return None
    if state.stopping:
        raise HttpError(503, "stopping", "this picker is stopping")
    pending = state.found.pending(state.clock())
    if pending:
        raise HttpError(503, "fleet_source_pending", f"no result yet of the fleet source {pending[0]}")
    missing = state.why_not_ready(required=state.config.proxy.min_ready_replicas)
    if missing is not None:
        raise HttpError(503, missing.code, missing.message)
    return OwnAnswer(200, b'{"status": "ready"}')


def own_answer(state: PickerState, head: RequestHead, client: str | None) -> OwnAnswer | None:
    """Return the answer to a request for models; `None` for a request for a replica.

    Raises `HttpError`: 404 for a path without a route, which an engine could take for an order, and 405.
    """
    path = head.path
    if path in _INFERENCE:
        if head.method != "POST":
            raise HttpError(405, "method_not_allowed", "expected POST", headers=((b"allow", b"POST"),))
        return None
    if path != _MODELS and not path.startswith(f"{_MODELS}/"):
        known = [*INFERENCE_ROUTES, _MODELS]
        message = f"no such route{closest(path[:200], known)}; there are: {', '.join(known)}"
        raise HttpError(404, "not_found", message)
    if head.method not in ("GET", "HEAD"):
        raise HttpError(405, "method_not_allowed", "expected GET", headers=((b"allow", b"GET, HEAD"),))
    rows = state.models.rows()
    if not rows:
        return None
    exceeded = state.router.quotas.count(client, now=state.clock())
    if exceeded is not None:
        raise HttpError(
            429, exceeded.code, exceeded.message, headers=((b"retry-after", b"%d" % ceil(exceeded.retry_after_s)),)
        )
    if path == _MODELS:
        return OwnAnswer(200, json.dumps({"object": "list", "data": rows}).encode())
    name = path[len(_MODELS) + 1 :]
    row = next((row for row in rows if row.get("id") == name), None)
    if row is None:
        raise unknown_model(state, name=name, client=client, listed=[row.get("id") for row in rows])
    return OwnAnswer(200, json.dumps(row).encode())
