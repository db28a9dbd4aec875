"""Arithmetic that costs share: what an unknown signal is worth, and the sum of the terms.

A policy states its cost as named columns, one entry per candidate, all in one unit; this module adds them up in one
place, so that what `/admin/decisions` shows is what was compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from gorgo.core.arrays import Floats
from gorgo.core.numeric import none_if_nan
from gorgo.core.policy.candidates import Candidates
from gorgo.core.policy.choice import Choice, Prediction, argmin_tiebreak


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
