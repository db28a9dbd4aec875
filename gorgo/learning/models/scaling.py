"""Z-scores of features, pooled over all replicas: a replica's identity changes no score."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

#: Standard deviation below which a column counts as constant, as a share of its mean: rounding of float32.
_CONSTANT = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class Scaler:
    """Mean and inverse standard deviation of each column of the training rows.

    Parameters
    ----------
    mean, inverse:
        float32, one value per column. The inverse of a constant column is 0, so that its z-score is 0 for any value.

    Example
    -------
    >>> Scaler.of(np.array([[1.0, 5.0], [3.0, 5.0]], dtype=np.float32)).apply(np.array([[3.0, 9.0]], dtype=np.float32))
    array([[1., 0.]], dtype=float32)
    """

    mean: NDArray[np.float32]
    inverse: NDArray[np.float32]

    @classmethod
    def of(cls, table: NDArray[np.float32]) -> Scaler:
        """Return the statistics of the rows of a table; it has one row or more."""
        mean = table.mean(axis=0, dtype=np.float64)
        deviation = table.std(axis=0, dtype=np.float64)
        varies = deviation > _CONSTANT * np.maximum(np.abs(mean), 1.0)
        inverse = np.divide(1.0, deviation, out=np.zeros_like(deviation), where=varies)
        return cls(mean.astype(np.float32), inverse.astype(np.float32))

    def apply(self, table: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the z-scores of a table's rows."""
        return (table - self.mean) * self.inverse
