"""The newest rows, and a replay buffer of older ones that a rule admits when they leave the first.

Theory of operation. Rows enter a FIFO. One that leaves it waits for the next round, which decides on all that wait:
while the replay buffer has space they are admitted; from then on a pool of them and of stored rows, chosen by chance,
is reduced by as many rows as there are too many. The coreset rule leaves those whose gradients differ most.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from gorgo.core.training.outcomes import TrainingRows
from gorgo.core.training.spec import TrainingSpec
from gorgo.learning.buffers.coreset import k_centre
from gorgo.learning.buffers.rings import RowRing

#: Rows among which a round chooses: a pick compares all, and 3,000 picks of 4,000 take about a second.
POOL = 4000
#: Rows that wait for a round, half of the pool so that stored rows compete; beyond it some are dropped by chance.
WAITING = POOL // 2
#: Older rows of rule `all`: more than the traces of the experiments have; a round takes some ten seconds then.
ALL_ROWS = 50_000


@runtime_checkable
class HasGradients(Protocol):
    """A model that the coreset rule can use."""

    def gradients(self, rows: TrainingRows, cap_s: float) -> NDArray[np.float32]:
        """Return a vector per row."""


class FifoReplay:
    """The rows of a round: FIFO and replay buffer.

    Parameters
    ----------
    spec:
        Sizes and rule.
    rng:
        Chance of the rule `random`, and of the pools.
    """

    def __init__(self, spec: TrainingSpec, rng: np.random.Generator) -> None:
        self._spec = spec
        self._rng = rng
        self._fifo = RowRing(spec.names, spec.fifo)
        self._waiting = TrainingRows.empty(spec.names)
        self._replay = TrainingRows.empty(spec.names)
        self._all = RowRing(spec.names, ALL_ROWS)
        self._left = 0

    def __len__(self) -> int:
        return len(self._fifo) + len(self._replay) + len(self._all)

    def add(self, rows: TrainingRows) -> None:
        """Put rows into the FIFO; those that leave it wait for `fill_replay`."""
        left = self._fifo.append(rows)
        match self._spec.replay_rule:
            case "all":
                self._all.append(left)
            case "random":
                self._sample(left)
            case "coreset":
                waiting = TrainingRows.concat([self._waiting, left])
                self._waiting = waiting.select(self._some(len(waiting), WAITING))

    def fill_replay(self, model: object) -> None:
        """Decide on the rows that wait, by the model of the last round; by chance if it has no gradients."""
        replay, waiting = self._replay, self._waiting
        surplus = max(0, len(replay) + len(waiting) - self._spec.replay)
        if not surplus:
            self._replay = TrainingRows.concat([replay, waiting])
        else:
            in_pool = np.zeros(len(replay), dtype=np.bool_)
            in_pool[self._some(len(replay), POOL - len(waiting))] = True
            pool = TrainingRows.concat([replay.select(in_pool), waiting])
            stays = self._choose(pool, len(pool) - surplus, model)
            self._replay = TrainingRows.concat([replay.select(~in_pool), pool.select(stays)])
        self._waiting = TrainingRows.empty(self._spec.names)

    def stored(self) -> TrainingRows:
        """Return the rows of a round, older ones first."""
        return TrainingRows.concat([self._all.stored(), self._replay, self._fifo.stored()])

    def _choose(self, pool: TrainingRows, count: int, model: object) -> NDArray[np.intp]:
        if isinstance(model, HasGradients):
            return np.sort(k_centre(model.gradients(pool, self._spec.target_cap_s), count))
        return self._some(len(pool), count)

    def _some(self, rows: int, count: int) -> NDArray[np.intp]:
        """Return `count` of so many rows by chance, in their order; all of them if there are no more."""
        return np.sort(self._rng.choice(rows, count, replace=False)) if count < rows else np.arange(rows)

    def _sample(self, left: TrainingRows) -> None:
        """Reservoir sampling: each row that ever left is stored with the same probability."""
        capacity = self._spec.replay
        space = max(0, min(len(left), capacity - self._left))
        self._replay = TrainingRows.concat([self._replay, left.select(slice(0, space))])
        numbers = self._left + np.arange(space, len(left))
        self._left += len(left)
        if not len(numbers) or not capacity:
            return
        cells = self._rng.integers(0, numbers + 1)
        source = np.arange(capacity + len(left))[: len(self._replay)]
        for row, cell in zip(range(space, len(left)), cells.tolist(), strict=True):
            if cell < capacity:
                source[cell] = capacity + row
        both = TrainingRows.concat([self._replay, left])
        self._replay = both.select(source)
