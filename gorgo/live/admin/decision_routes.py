"""The admin routes about decisions: the last ones as a list, and all of one request."""

from __future__ import annotations

from dataclasses import asdict
from itertools import islice
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gorgo.live.admin.bodies import count_of, json_response
from gorgo.live.admin.page.snapshot import DecisionStatus, decision_rows
from gorgo.live.http.errors import HttpError
from gorgo.live.state import Routing

#: Rows of a list without `limit`.
DEFAULT_ROWS = 100


class DecisionRoutes:
    """The handlers of one running proxy."""

    def __init__(self, routing: Routing) -> None:
        self._routing = routing

    async def newest(self, request: Request) -> Response:
        """Return the last decisions, newest first, without the terms of their candidates."""
        limit = count_of(request, "limit", DEFAULT_ROWS)
        replica, policy = request.query_params.get("replica"), request.query_params.get("policy")
        router, now = self._routing.router, self._routing.clock()
        stored = router.view.newest_decisions(router.settings.limits.max_decisions)
        rows = decision_rows(stored, router.samples.newest(len(router.samples)), router.view.snapshots(now=now))
        chosen = (
            row for row in rows if replica in (None, row.decision.replica) and policy in (None, row.decision.policy)
        )
        return json_response({"now_s": now, "decisions": [_summary(row) for row in islice(chosen, limit)]})

    async def of_request(self, request: Request) -> Response:
        """Return every decision of a request, with the terms of each candidate, and its sample once it has ended."""
        request_id = request.path_params["request_id"]
        found = self._routing.router.view.decisions(request_id)
        if not found:
            most = self._routing.router.settings.limits.max_decisions
            message = f"no stored decision has this request id; the last {most:,} decisions are stored"
            raise HttpError(404, "decision_not_found", message)
        sample = self._routing.router.samples.for_request(request_id)
        return json_response(
            {
                "request_id": request_id,
                "decisions": [decision.as_dict() for decision in found],
                "sample": None if sample is None else asdict(sample),
            }
        )


def _summary(row: DecisionStatus) -> dict[str, Any]:
    decision, sample = row.decision, row.sample
    return {
        "request_id": decision.request_id,
        "attempt": decision.attempt,
        "client": decision.client,
        "model": decision.model,
        "decided_s": decision.decided_s,
        "policy": decision.policy,
        "weights_version": decision.weights_version,
        "replica": decision.replica,
        "region": row.region,
        "candidates": len(decision.candidates),
        "fallback": decision.fallback,
        "prompt_tokens": decision.prompt_tokens,
        "estimated_cached_tokens": decision.estimated_cached_tokens,
        "cache_source": decision.cache_source,
        "predicted_ttft_ms": None if decision.predicted_ttft_s is None else decision.predicted_ttft_s * 1e3,
        "ttft_ms": None if sample is None else sample.ttft_ms,
        "status": None if sample is None else sample.status,
        "followed": row.followed,
    }
