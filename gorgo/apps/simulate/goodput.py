"""How much of what was asked was served well: the share of offered requests, and how many per second.

Owns the bounds and the arithmetic. A request that was turned away, or failed, was offered and not served well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gorgo.sim.records import SimRecord

#: What served well means: first token within, last within.
TTFT_MS, E2E_S = 2000.0, 10.0


@dataclass(frozen=True, slots=True)
class Goodput:
    """Of one run; shares are of all requests offered.

    `good` got their first token within 2 s and their last within 10 s, `per_s` is how many of those per second of the
    feed. `rejected` were turned away or failed, `held` waited at the proxy before they were sent, `hedged` were sent to
    a second replica.
    """

    offered: int
    good: float
    per_s: float
    rejected: float
    held: float
    hedged: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def goodput_of(records: Sequence[SimRecord]) -> Goodput | None:
    """None for a run without a request."""
    if not records:
        return None
    n = len(records)
    good = sum(map(_is_good, records))
    lasted_s = records[-1].scheduled_s - records[0].scheduled_s
    return Goodput(
        offered=n,
        good=good / n,
        per_s=good / lasted_s if lasted_s > 0 else float(good),
        rejected=sum(record.error is not None for record in records) / n,
        held=sum(record.queued_s > 0.0 for record in records) / n,
        hedged=sum(record.hedged for record in records) / n,
    )


def _is_good(record: SimRecord) -> bool:
    if record.error is not None or record.ttft_ms is None or record.e2e_s is None:
        return False
    return record.ttft_ms <= TTFT_MS and record.e2e_s <= E2E_S
