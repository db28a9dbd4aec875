"""Goodput: the share of offered requests that were served well, and their rate.

Owns the arithmetic; the bounds are `apps.served`. A rejected or failed request was offered and not served well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gorgo.apps.served import is_good
from gorgo.sim.records import SimRecord


@dataclass(frozen=True, slots=True)
class Goodput:
    """Goodput of one run; ratios are of all requests offered.

    `good` is the ratio with a first token within 2 s and a last one within 10 s, `per_s` their rate over the workload.
    `rejected` were rejected or failed, `queued` waited at the proxy, `hedged` had a second attempt.
    """

    offered: int
    good: float
    per_s: float
    rejected: float
    queued: float
    hedged: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def goodput_of(records: Sequence[SimRecord]) -> Goodput | None:
    """Return the goodput; None for a run without a request."""
    if not records:
        return None
    n = len(records)
    good = sum(map(is_good, records))
    lasted_s = records[-1].scheduled_s - records[0].scheduled_s
    return Goodput(
        offered=n,
        good=good / n,
        per_s=good / lasted_s if lasted_s > 0 else float(good),
        rejected=sum(record.error is not None for record in records) / n,
        queued=sum(record.queued_s > 0.0 for record in records) / n,
        hedged=sum(record.hedged for record in records) / n,
    )
