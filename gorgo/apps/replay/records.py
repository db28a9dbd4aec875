"""The record of one finished request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, kw_only=True)
class ReplayRecord:
    """One line of requests.jsonl, and fields of the summary alone.

    Times are in seconds from the start of the replay. Latencies count from `scheduled_s`, the time
    in the trace, not from `sent_s`: a client or router that falls behind does not appear faster. Values that a router
    does not report are None.
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

    # Not in requests.jsonl.
    policy: str | None = None
    estimated_cached_tokens: float | None = None
    gaps_s: tuple[float, ...] = ()

    @property
    def slip_s(self) -> float:
        """How late it was sent."""
        return max(0.0, self.sent_s - self.scheduled_s)

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
            "ttft_ms": None if self.ttft_ms is None else round(self.ttft_ms, 3),
            "e2e_s": None if self.e2e_s is None else round(self.e2e_s, 6),
            "status": self.status,
            "error": self.error,
            "weights_version": self.weights_version,
            "predicted_ttft_ms": self.predicted_ttft_ms,
        }
