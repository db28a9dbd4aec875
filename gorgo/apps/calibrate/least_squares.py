"""Least squares with coefficients of at least 0, by relative error.

Owns the arithmetic of `fit`. A cost of an engine is a sum of terms that are never negative, and an error of 5 ms
matters for a time of 20 ms and not for one of 2 s.

Theory of operation: every subset of the few terms is solved without a constraint. The best solution without a negative
coefficient is the constrained one, because the optimum is interior to the face that its zeros span (Lawson and Hanson
1974, chapter 23).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64]


def solve(columns: Sequence[Sequence[float]], measured: Sequence[float]) -> tuple[list[float], float]:
    """Return the coefficients, and the root mean square of the relative errors.

    `columns` has one sequence per term, as long as `measured`, which is above 0. A term that is 0 throughout gets the
    coefficient 0.

    Example
    -------
    >>> coefficients, error = solve([[1, 1, 1], [1, 2, 4]], [3.0, 5.0, 9.0])
    >>> [round(value, 6) for value in coefficients], round(error, 6)
    ([1.0, 2.0], 0.0)
    >>> [round(value, 6) for value in solve([[1, 1], [1, 2]], [2.0, 1.0])[0]]  # a falling line is none
    [1.2, 0.0]
    """
    target = np.asarray(measured, dtype=np.float64)
    terms = np.asarray(columns, dtype=np.float64).T / target[:, None]
    ones = np.ones(len(target))
    usable = [place for place in range(terms.shape[1]) if terms[:, place].any()]
    best, least = np.zeros(terms.shape[1]), 1.0
    for size in range(1, len(usable) + 1):
        for chosen in combinations(usable, size):
            found = _positive(terms[:, list(chosen)], ones)
            if found is None:
                continue
            error = float(np.sqrt(np.mean((terms[:, list(chosen)] @ found - 1.0) ** 2)))
            if error < least:
                best, least = np.zeros(terms.shape[1]), error
                best[list(chosen)] = found
    return best.tolist(), least


def _positive(terms: Matrix, ones: Matrix) -> Matrix | None:
    """Return the unconstrained solution; None if it has a negative coefficient or is not unique."""
    # Terms differ by nine orders of magnitude: seconds, tokens, tokens squared.
    scale = np.sqrt((terms**2).sum(axis=0))
    found, _, rank, _ = np.linalg.lstsq(terms / scale, ones, rcond=1e-10)
    if rank < terms.shape[1] or (found < 0).any():
        return None
    return np.asarray(found / scale, dtype=np.float64)
