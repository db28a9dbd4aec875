"""The record of one request of a replay."""

from __future__ import annotations

from dataclasses import dataclass

from gorgo.sim.records import ClientRecord


@dataclass(slots=True, kw_only=True)
class ReplayRecord(ClientRecord):
    """One request, and what only the summary uses. Values that a router does not report are None."""

    policy: str | None = None
    estimated_cached_tokens: float | None = None
    gaps_s: tuple[float, ...] = ()

    @property
    def slip_s(self) -> float:
        """How late it was sent."""
        return max(0.0, self.sent_s - self.scheduled_s)
