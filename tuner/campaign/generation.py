"""One generation: the record that the campaign makes, the history keeps and the report shows.

Owns its fields, so that the three cannot differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One weight set under test, and what became of it.

    Parameters
    ----------
    number:
        From 0 within the campaign; 0 is the start.
    started_s, finished_s:
        Seconds of the clock that the campaign is given; in the history always since 1970.
    weights, weights_version:
        What was tried, and the version under which the proxy routed it; None where it never reached the proxy.
    sigma:
        Step size in log space; None for an optimizer without one.
    mode, optimizer:
        How it was compared and who proposed it.
    n:
        Samples in its window. Figures without one are None.
    objective_ms, incumbent_objective_ms:
        p95 TTFT of the window and of the incumbent's.
    e2e_s_p95, itl_ms_p95, errors, max_share:
        The guard's figures: p95 end to end, p95 gap between tokens, failed requests, largest share of one replica.
    accepted, reason:
        What was decided, and why in words.
    """

    number: int
    started_s: float
    finished_s: float
    weights: Mapping[str, float]
    weights_version: int | None
    sigma: float | None
    mode: str
    optimizer: str
    n: int
    objective_ms: float | None
    incumbent_objective_ms: float | None
    e2e_s_p95: float | None
    itl_ms_p95: float | None
    errors: int
    max_share: float | None
    accepted: bool
    reason: str

    def as_json(self) -> dict[str, Any]:
        """As `gorgo history --json` and the report's `history.json` have it."""
        return {**asdict(self), "weights": dict(self.weights)}
