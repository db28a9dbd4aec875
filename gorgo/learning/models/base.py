"""What every kind of model has: the facts of its training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gorgo.core.training.outcomes import TrainingRows


@dataclass(frozen=True, slots=True, eq=False)
class FittedModel:
    """Facts of a training: its round, its features, and the range of its rows.

    Parameters
    ----------
    version:
        Number of the round, from 1.
    names:
        Features in the order of a table's columns.
    low, high:
        Least and greatest value of each feature in the training.
    samples:
        Rows of the training.
    """

    version: int
    names: tuple[str, ...]
    low: NDArray[np.float32]
    high: NDArray[np.float32]
    samples: int


def facts(rows: TrainingRows, version: int) -> dict[str, Any]:
    """Return the fields of `FittedModel` for a training on these rows."""
    return {
        "version": version,
        "names": rows.names,
        "low": rows.features.min(axis=0),
        "high": rows.features.max(axis=0),
        "samples": len(rows),
    }
