"""A policy's choice among candidates, its prediction, the sum of its terms, and the tie-break that all policies share.

Owns the records and this arithmetic (`choose_min_cost`). Leaves the terms to each policy. Costs are positive, lower is
better, in the unit the policy states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field

import numpy as np
from numpy.typing import NDArray

from gorgo.core.numeric import Floats, none_if_nan
from gorgo.core.policy.candidates import Candidates
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


# Arithmetic that costs share: what an unknown signal is worth, and the sum of the terms.
#
# A policy states its cost as named columns, one entry per candidate, all in one unit; this module adds them up in one
# place, so that what `/admin/decisions` shows is what was compared.


def fill_unknown(column: Floats) -> Floats:
    """`column` with each unknown cell (NaN) taken as the worst known one, 0 where none is known.

    Unknown must never look free: a replica that has not answered a probe yet would attract all requests.
    """
    worst = column[column.argmax()]  # a fourth of the time of a reduction
    if worst == worst:  # NaN would have been the maximum: nothing is unknown
        return column
    worst = np.fmax.reduce(column)
    return np.where(np.isnan(column), worst if worst == worst else 0.0, column)


def choose_min_cost(
    terms: Mapping[str, Floats],
    candidates: Candidates,
    rng: np.random.Generator,
    *,
    fallback: str | None = None,
    predicted_ttft_s: Floats | Callable[[int], float | None] | None = None,
    forecast: Callable[[], Prediction] | None = None,
) -> Choice:
    """Return the candidate with the least sum of `terms`; ties go to the fewest in flight, then to chance.

    The decision retains the terms, so they must be the caller's own arrays, never the fleet's columns.
    `predicted_ttft_s` has an entry per candidate, NaN without a prediction, or is called for single rows.
    """
    columns = iter(terms.values())
    cost = next(columns)
    for column in columns:
        cost = cost + column
    row = argmin_tiebreak(cost, candidates.in_flight_requests, rng)
    predicts = _cell_of(predicted_ttft_s) if isinstance(predicted_ttft_s, np.ndarray) else predicted_ttft_s
    return Choice(row, terms, cost, None if predicts is None else predicts(row), fallback, predicts, forecast)


def _cell_of(column: Floats) -> Callable[[int], float | None]:
    def cell(row: int) -> float | None:
        return none_if_nan(column[row])

    return cell
