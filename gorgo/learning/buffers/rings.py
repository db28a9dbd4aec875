"""The newest rows of training, in ring arrays that grow to a capacity."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gorgo.core.training.outcomes import COLUMNS, TrainingRows

#: Rows of the first allocation: most rings of a stratified store stay small.
_FIRST_ROWS = 64


class RowRing:
    """A queue of rows; the oldest leave when it is full.

    Parameters
    ----------
    names:
        Features of a row.
    capacity:
        Most rows stored. Memory doubles up to it as rows come.
    """

    def __init__(self, names: tuple[str, ...], capacity: int) -> None:
        self.names = names
        self.capacity = capacity
        self._cells = TrainingRows.empty(names)
        self._first = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def allocated(self) -> int:
        """Rows that there is memory for."""
        return len(self._cells)

    def append(self, rows: TrainingRows) -> TrainingRows:
        """Add rows, and return those that left for them, oldest first."""
        passing = max(0, len(rows) - self.capacity)
        leaving = max(0, min(self._count, self._count + len(rows) - self.capacity))
        left = TrainingRows.concat([self._oldest(leaving), rows.select(slice(0, passing))])
        self._first += leaving
        self._count -= leaving
        added = len(rows) - passing
        self._reserve(self._count + added)
        if added:
            cells = self._positions(self._count, self._count + added)
            for name in COLUMNS:
                getattr(self._cells, name)[cells] = getattr(rows, name)[passing:]
            self._count += added
        return left

    def stored(self) -> TrainingRows:
        """Return copies of all rows, oldest first."""
        return self._oldest(self._count)

    def _oldest(self, count: int) -> TrainingRows:
        return self._cells.select(self._positions(0, count))

    def _positions(self, start: int, end: int) -> NDArray[np.intp]:
        """Return the cells of rows by their rank, the oldest being 0."""
        return (self._first + np.arange(start, end)) % max(1, len(self._cells))

    def _reserve(self, count: int) -> None:
        """Make memory for `count` rows."""
        if count > len(self._cells):
            rows = self.stored()
            size = min(self.capacity, max(_FIRST_ROWS, 2 * count))
            self._cells = TrainingRows.concat([rows, TrainingRows.empty(self.names, size - len(rows))])
            self._first = 0
