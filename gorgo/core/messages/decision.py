"""One routing decision and what is needed to explain it later: every candidate's terms.

Owns the records `Choice` (what a policy answers) and `Decision` (what the Router keeps), and the tie-break that all
policies share. Costs are positive, lower is better, in the unit the policy states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gorgo.core.latency.ttft import TtftEstimate

if TYPE_CHECKING:
    from gorgo.core.policy.shadow import ShadowScore

#: Costs this close count as equal (absolute, in the policy's own unit): near-ties in a burst herd.
TIE_EPSILON = 1e-9


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a policy predicts for each candidate, s: network and prefill if nobody else were there, the work before
    this request, and its prefill by itself.
    """

    idle_s: NDArray[np.float64]
    backlog_s: NDArray[np.float64]
    prefill_s: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Choice:
    """A policy's answer: the row picked among the candidates, and why.

    `terms` holds one column per named term of the cost, one entry per candidate; `cost` is their sum where the policy
    has a cost. `fallback` says in a word why the primary rule did not decide (`None` when it did). `predicts` is the
    predicted time to first token of any row, where the policy predicts, and `forecast` what that is made of.
    """

    row: int
    terms: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    cost: NDArray[np.float64] | None = None
    predicted_ttft_s: float | None = None
    fallback: str | None = None
    predict: Callable[[int], float | None] | None = None
    prediction: Callable[[], Prediction] | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """A choice as made: who was asked, with which weights, and the terms of each candidate. No prompt text."""

    request_id: str
    attempt: int
    decided_s: float
    policy: str
    unit: str
    weights_version: int
    weights: Mapping[str, float]
    candidates: Sequence[str]
    #: Of the replica chosen, among the candidates.
    row: int
    terms: Mapping[str, NDArray[np.float64]]
    cost: NDArray[np.float64] | None
    prompt_tokens: int
    estimated_cached_tokens: int
    #: The same on whichever candidate has most.
    best_cached_tokens: int
    predicted_ttft_s: float | None
    estimate: TtftEstimate
    fallback: str | None
    #: Replicas left out and the reason: `draining`, `ejected`, `tried`, `model`, `region`, `slow_start`, `full`.
    excluded: Mapping[str, str]
    #: What a shadow policy makes of the replica chosen.
    shadow: ShadowScore | None = None

    @property
    def replica(self) -> str:
        """The replica chosen."""
        return self.candidates[self.row]

    def as_dict(self) -> dict[str, Any]:
        """JSON form for `/admin/decisions/{id}`: one object per candidate, terms by name."""
        rows: list[dict[str, Any]] = []
        for row, name in enumerate(self.candidates):
            cost = None if self.cost is None else _number(self.cost[row])
            terms = {term: _number(column[row]) for term, column in self.terms.items()}
            rows.append({"replica": name, "cost": cost, "terms": terms})
        return {
            "request_id": self.request_id,
            "attempt": self.attempt,
            "decided_s": self.decided_s,
            "policy": self.policy,
            "unit": self.unit,
            "weights_version": self.weights_version,
            "weights": dict(self.weights),
            "replica": self.replica,
            "prompt_tokens": self.prompt_tokens,
            "estimated_cached_tokens": self.estimated_cached_tokens,
            "best_cached_tokens": self.best_cached_tokens,
            "predicted_ttft_ms": None if self.predicted_ttft_s is None else self.predicted_ttft_s * 1e3,
            "predicted_parts_ms": dict(self.estimate.as_ms()),
            "fallback": self.fallback,
            "shadow": None if self.shadow is None else self.shadow.as_dict(),
            "candidates": rows,
            "excluded": dict(self.excluded),
        }


def argmin_tiebreak(cost: NDArray[np.float64], in_flight: NDArray[np.float64], rng: np.random.Generator) -> int:
    """Row of the least cost; ties go to the fewest in flight, then to chance, so that a burst does not herd."""
    least = int(cost.argmin())
    near = cost <= cost[least] + TIE_EPSILON
    if np.count_nonzero(near) == 1:
        return least
    tied = np.flatnonzero(near)
    load = in_flight[tied]
    tied = tied[load == load.min()]
    return int(tied[0] if len(tied) == 1 else tied[rng.integers(len(tied))])


def _number(value: float) -> float | None:
    """JSON has no NaN: unknown is null."""
    return None if np.isnan(value) else float(value)
