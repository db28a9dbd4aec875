"""Rows by how loaded the replica was: rare states are not displaced by the common idle one.

A ring per class of queue, KV usage and cached share, as in llm-d's training server.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gorgo.core.training.outcomes import TrainingRows
from gorgo.learning.buffers.rings import RowRing

#: Least engine queue of each class but the first: 0, 1-2, 3-5, 6-10, 11 and more.
_QUEUES = (1.0, 3.0, 6.0, 11.0)
_KV_CLASSES = 20
_PREFIX_CLASSES = 4
STRATA = (len(_QUEUES) + 1) * _KV_CLASSES * _PREFIX_CLASSES
#: Rows of a ring; 200,000 in all, which is 40 MB with 20 features.
RING_ROWS = 500


class StratifiedStore:
    """The newest rows of each class.

    Parameters
    ----------
    names:
        Features of a row. `queued_requests`, `kv_usage` and `hit_share` make the classes; one that is not among them
        is one class.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._rings: dict[int, RowRing] = {}

    def __len__(self) -> int:
        return sum(map(len, self._rings.values()))

    @property
    def allocated(self) -> int:
        """Rows that there is memory for."""
        return sum(ring.allocated for ring in self._rings.values())

    def add(self, rows: TrainingRows) -> None:
        """Put each row into the ring of its class."""
        classes = strata(rows)
        for number in np.unique(classes).tolist():
            ring = self._rings.setdefault(number, RowRing(self._names, RING_ROWS))
            ring.append(rows.select(np.flatnonzero(classes == number)))

    def stored(self) -> TrainingRows:
        """Return all rows, by the time of their dispatch."""
        rings = [self._rings[number].stored() for number in sorted(self._rings)]
        rows = TrainingRows.concat([TrainingRows.empty(self._names), *rings])
        return rows.select(np.argsort(rows.dispatched_s, kind="stable"))


def strata(rows: TrainingRows) -> NDArray[np.intp]:
    """Return the class of each row, from 0 to `STRATA` - 1."""
    queue = np.searchsorted(_QUEUES, _column(rows, "queued_requests"), side="right")
    kv = _steps(_column(rows, "kv_usage"), _KV_CLASSES)
    prefix = _steps(_column(rows, "hit_share"), _PREFIX_CLASSES)
    classes: NDArray[np.intp] = (queue * _KV_CLASSES + kv) * _PREFIX_CLASSES + prefix
    return classes


def _column(rows: TrainingRows, name: str) -> NDArray[np.float64]:
    """A feature of each row, or zeros if it is not among them."""
    if name not in rows.names:
        return np.zeros(len(rows))
    return rows.features[:, rows.names.index(name)].astype(np.float64)


def _steps(share: NDArray[np.float64], steps: int) -> NDArray[np.intp]:
    """Return the step of a share from 0 to 1; a share outside belongs to the nearest step."""
    return np.clip(np.floor(share * steps), 0, steps - 1).astype(np.intp)
