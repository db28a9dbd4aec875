"""`GET /v1/models` and `GET /v1/models/{model}`: known models, or a replica's own list where none is known."""

from __future__ import annotations

import json
from typing import Any

from gorgo.live.http.errors import HttpError, Message, Send, send_json
from gorgo.live.http.headers import upstream_headers
from gorgo.live.request.own_answers import count_own_answer, model_list, model_row
from gorgo.live.state import LiveState
from gorgo.live.upstream.client import UpstreamError

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
    return [row for row in data if isinstance(row, dict)] if isinstance(data, list) else []


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
