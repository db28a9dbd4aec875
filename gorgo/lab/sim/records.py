"""Results of a simulation: a record per request, and the gaps between tokens in one histogram.

Owns the records, and the line of `requests.jsonl`, which a live replay writes with the same keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gorgo.core.messages.decision import ShadowScore
from gorgo.lab.sim.engine.itl import ItlHistogram


@dataclass(slots=True, kw_only=True)
class ClientRecord:
    """A request as a client sees it: a line of requests.jsonl, of a simulation and of a replay alike.

    Times are in seconds from the start of the run. Latencies count from `scheduled_s`, the time in the trace, not from
    `sent_s`: a client or router that falls behind does not appear faster. Missing values are None. `replica`,
    `weights_version` and the prediction are those of the last dispatch.
    """

    id: str
    scheduled_s: float
    sent_s: float
    input_tokens: int
    replica: str | None = None
    region: str | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    ttft_ms: float | None = None
    e2e_s: float | None = None
    status: int | None = None
    error: str | None = None
    weights_version: int | None = None
    predicted_ttft_ms: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the keys of a line of requests.jsonl."""
        return {
            "id": self.id,
            "scheduled_s": round(self.scheduled_s, 6),
            "sent_s": round(self.sent_s, 6),
            "replica": self.replica,
            "region": self.region,
            "input_tokens": self.input_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "ttft_ms": _rounded(self.ttft_ms, 3),
            "e2e_s": _rounded(self.e2e_s, 6),
            "status": self.status,
            "error": self.error,
            "weights_version": self.weights_version,
            "predicted_ttft_ms": _rounded(self.predicted_ttft_ms, 1),
        }


@dataclass(slots=True, kw_only=True)
class SimRecord(ClientRecord):
    """One simulated request, with what only the Router knows."""

    estimated_cached_tokens: int | None = None
    attempts: int = 0
    #: How long it waited at the proxy, and whether it was sent to a second replica as well.
    queued_s: float = 0.0
    hedged: bool = False
    #: How often its answer went on at another replica.
    continued: int = 0
    #: Of the TTFT, the client's way to its router and back.
    client_network_ms: float = 0.0
    #: Score of the chosen replica by the shadow policy.
    shadow: ShadowScore | None = None

    def as_json(self) -> dict[str, Any]:
        """Return a line of requests.jsonl, with `estimated_cached_tokens` and the fields of `gorgo rank`."""
        line = ClientRecord.as_json(self)  # `super()` has no meaning in a class with slots that dataclass made anew
        return self._shadow_json() | line | {"estimated_cached_tokens": self.estimated_cached_tokens}

    def _shadow_json(self) -> dict[str, Any]:
        if self.shadow is None:
            return {}
        return {
            "shadow_policy": self.shadow.policy,
            "shadow_rank": self.shadow.rank,
            "retries": max(self.attempts - 1 - self.continued, 0),
        }


@dataclass(frozen=True, slots=True)
class SimResult:
    """A finished run: records in the order of the feed, pooled gaps of completed requests, and its duration.

    `preemptions` are those of all engines, also of those that were killed.
    """

    records: Sequence[SimRecord]
    gaps: ItlHistogram
    ended_s: float
    events: int
    preemptions: int = 0


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
