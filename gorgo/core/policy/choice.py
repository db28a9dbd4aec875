"""A policy's choice among candidates, its prediction, and the tie-break that all policies share.

Costs are positive, lower is better, in the unit the policy states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field

import numpy as np
from numpy.typing import NDArray

from gorgo.core.record import record

#: Costs this close count as equal (absolute, in the policy's own unit): near-ties in a burst herd.
TIE_EPSILON = 1e-9


@record
class Prediction:
    """A policy's prediction for each candidate, s: network and prefill on an idle replica, the work before this
    request, and its prefill alone.
    """

    idle_s: NDArray[np.float64]
    backlog_s: NDArray[np.float64]
    prefill_s: NDArray[np.float64]


@record
class Choice:
    """A policy's answer: the row picked among the candidates, and why.

    `terms` holds one column per named term of the cost, one entry per candidate; `cost` is their sum where the policy
    has a cost. `fallback` says in a word why the primary rule did not decide (`None` when it did). `predict` returns
    the predicted time to first token of any row, where the policy predicts, and `prediction` its parts. `features` is
    the table that a learned policy evaluated, one row per candidate. `learn` is called with the time when an attempt by
    this choice completes.
    """

    row: int
    terms: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    cost: NDArray[np.float64] | None = None
    predicted_ttft_s: float | None = None
    fallback: str | None = None
    predict: Callable[[int], float | None] | None = None
    prediction: Callable[[], Prediction] | None = None
    features: NDArray[np.float32] | None = None
    learn: Callable[[float], None] | None = None


def argmin_tiebreak(cost: NDArray[np.float64], in_flight: NDArray[np.float64], rng: np.random.Generator) -> int:
    """Return the row of the least cost; ties go to the fewest in flight, then to chance, against herding in a burst."""
    least = int(cost.argmin())
    tied = (cost <= cost[least] + TIE_EPSILON).nonzero()[0]
    if len(tied) == 1:
        return least
    load = in_flight[tied]
    tied = tied[load == load.min()]
    return int(tied[0] if len(tied) == 1 else tied[rng.integers(len(tied))])


def least_of_rows(cost: Sequence[float], least: float, in_flight: NDArray[np.float64], rng: np.random.Generator) -> int:
    """Return the row that `argmin_tiebreak` returns for a few costs, in a third of its time; `least` is their least."""
    bound = least + TIE_EPSILON
    tied = [row for row, each in enumerate(cost) if each <= bound]
    if len(tied) <= 1:
        return cost.index(least)
    loads = in_flight.tolist()
    fewest = min([loads[row] for row in tied])
    tied = [row for row in tied if loads[row] == fewest]
    return tied[0] if len(tied) == 1 else tied[int(rng.integers(len(tied)))]
