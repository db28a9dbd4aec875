"""What the history hands out: frozen rows, with times as seconds since 1970 (UTC) and latencies as measured.

Owns the records but a generation's, which is the campaign's own; how they are stored is `models` and `store`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

EventKind = Literal["freeze", "thaw", "rollback", "foreign", "restart", "stop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignRow:
    """One run of the tuner from its start to its end; a restarted sidecar continues the same one.

    `options` are those it was started with. `finished_s` and `outcome` are None while it runs.
    """

    id: int
    started_s: float
    finished_s: float | None
    outcome: str | None
    target: str
    policy: str
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRow:
    """Something other than a generation: a freeze, a thaw, a roll-back, weights of somebody else, a restart, a stop."""

    at_s: float
    kind: EventKind
    weights: Mapping[str, float] | None
    reason: str
