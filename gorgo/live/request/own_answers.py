"""What a front end answers itself, without a replica: readiness, and the models that are known.

Each function returns a body of JSON, or raises the `HttpError` of the answer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import ceil
from typing import Any

from gorgo.live.http.errors import HttpError
from gorgo.live.request.parse import unknown_model
from gorgo.live.state import LiveState, Routing, Telemetry

ALIVE = b'{"status": "ok"}'


def readiness(state: LiveState) -> bytes:
    """Return the answer to a load balancer that may send requests here. Raises `HttpError` (503)."""
    if state.stopping:
        raise HttpError(503, "stopping", f"this {state.kind.name} is stopping")
    pending = state.replicas.found.pending(state.routing.clock())
    if pending:
        raise HttpError(503, "fleet_source_pending", f"no result yet of the fleet source {pending[0]}")
    missing = state.why_not_ready(required=state.config.proxy.min_ready_replicas)
    if missing is not None:
        raise HttpError(503, missing.code, missing.message)
    return b'{"status": "ready"}'


def count_own_answer(routing: Routing, telemetry: Telemetry, client: str | None) -> None:
    """Count a request for models against the rates of its client. Raises `HttpError` (429)."""
    exceeded = routing.router.quotas.count(client, now=routing.clock())
    if exceeded is not None:
        telemetry.metrics.rejected(exceeded.code)
        retry = ((b"retry-after", b"%d" % ceil(exceeded.retry_after_s)),)
        raise HttpError(429, exceeded.code, exceeded.message, headers=retry)


def model_list(rows: Sequence[dict[str, Any]]) -> bytes:
    """Return the list of models."""
    return json.dumps({"object": "list", "data": rows}).encode()


def model_row(routing: Routing, rows: Sequence[dict[str, Any]], name: str, *, client: str | None) -> bytes:
    """Return one row of the list. Raises `HttpError` (404) with the models that there are."""
    row = next((row for row in rows if row.get("id") == name), None)
    if row is None:
        raise unknown_model(routing, name=name, client=client, listed=[row.get("id") for row in rows])
    return json.dumps(row).encode()
