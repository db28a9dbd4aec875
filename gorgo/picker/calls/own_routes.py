"""What an own Envoy's picker answers itself, as the proxy does: health, readiness, known models; and the 404 and 405.

A gateway has routes of its own: there each path goes to a replica.
"""

from __future__ import annotations

from gorgo.core.record import record
from gorgo.errors import closest
from gorgo.live.http.errors import HttpError
from gorgo.live.request.own_answers import ALIVE, count_own_answer, model_list, model_row, readiness
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
        return OwnAnswer(200, ALIVE)
    if head.path not in _READY:
        return None
    return OwnAnswer(200, readiness(state.live))


def own_answer(state: PickerState, head: RequestHead, client: str | None) -> OwnAnswer | None:
    """Return the answer to a request for models; `None` for a request for a replica.

    Raises `HttpError`: 404 for a path without a route, which an engine could take for an order, and 405.
    """
    path = head.path
    if path in _INFERENCE:
        return None
    if path != _MODELS and not path.startswith(f"{_MODELS}/"):
        known = [*INFERENCE_ROUTES, _MODELS]
        message = f"no such route{closest(path[:200], known)}; there are: {', '.join(known)}"
        raise HttpError(404, "not_found", message)
    if head.method not in ("GET", "HEAD"):
        raise HttpError(405, "method_not_allowed", "expected GET", headers=((b"allow", b"GET, HEAD"),))
    rows = state.routing.models.rows()
    if not rows:
        return None
    count_own_answer(state.routing, state.telemetry, client)
    if path == _MODELS:
        return OwnAnswer(200, model_list(rows))
    return OwnAnswer(200, model_row(state.routing, rows, path[len(_MODELS) + 1 :], client=client))
