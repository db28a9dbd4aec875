"""Outcomes of attempts as rows for a training, in a bounded ring that a reader follows by sequence number.

Theory of operation. Every attempt leaves a row when it ends: the features of its replica at the decision, and the times
that followed. Times count from the attempt's dispatch, so neither the queue of the proxy nor an earlier attempt is
learned as time of the engine. An answer in one piece has no first token: its row has the time to its end in that place,
and says so, since the two are not compared (the feature `streamed`). An attempt that ends without an answer leaves a
censored row: its time is at least the time elapsed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gorgo.core.numeric import Floats
from gorgo.core.record import record
from gorgo.errors import ConfigError

#: Rows in a ring: as many as the largest training of Lodestar, which a reader every second can miss none of.
OUTCOMES = 10_000


@record
class OutcomeRow:
    """The outcome of one attempt, as it is written; `TrainingRows` has many of them by column.

    Times in s from its dispatch; NaN is unknown.
    """

    dispatched_s: float
    #: Of an answer in one piece the time to its end; of a censored row the time elapsed.
    ttft_s: float
    e2e_s: float
    prompt_tokens: float
    #: Slot of the replica.
    slot: int
    censored: bool
    tpot_s: float = nan
    output_tokens: float = nan
    cached_tokens: float = nan
    #: Hash of the prefix group (`candidate_table.prefix_group`).
    group: int = 0
    #: Whether the answer comes in one piece.
    unstreamed: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class TrainingRows:
    """Outcomes as columns, oldest first. Times in s; NaN is unknown.

    Parameters
    ----------
    names:
        Features in the order of the columns of `features`.
    features:
        A row per attempt, of the replica that served it.
    dispatched_s:
        When it was dispatched.
    ttft_s:
        From its dispatch to its first token, or to its end if it is `unstreamed`; of a censored row the time elapsed.
    tpot_s:
        Mean time per output token after the first.
    e2e_s:
        From its dispatch to its end.
    output_tokens, cached_tokens, prompt_tokens:
        As reported by the engine; the prompt as estimated where it was not.
    censored:
        Whether it ended without a first token.
    slots:
        Slot of the replica.
    groups:
        Hash of the prefix group, 0 for a prompt without a full block.
    unstreamed:
        Whether its answer comes in one piece.
    first_seq:
        Number of the first row, where rows are numbered without gaps.
    """

    names: tuple[str, ...]
    features: NDArray[np.float32]
    dispatched_s: Floats
    ttft_s: Floats
    tpot_s: Floats
    e2e_s: Floats
    output_tokens: Floats
    cached_tokens: Floats
    prompt_tokens: Floats
    censored: NDArray[np.bool_]
    slots: NDArray[np.intp]
    groups: NDArray[np.int64]
    unstreamed: NDArray[np.bool_]
    first_seq: int = 0

    @classmethod
    def empty(cls, names: tuple[str, ...], rows: int = 0) -> TrainingRows:
        """Return rows of zeros."""
        return cls(
            names,
            features=np.zeros((rows, len(names)), dtype=np.float32),
            dispatched_s=np.zeros(rows),
            ttft_s=np.zeros(rows),
            tpot_s=np.zeros(rows),
            e2e_s=np.zeros(rows),
            output_tokens=np.zeros(rows),
            cached_tokens=np.zeros(rows),
            prompt_tokens=np.zeros(rows),
            censored=np.zeros(rows, dtype=np.bool_),
            slots=np.zeros(rows, dtype=np.intp),
            groups=np.zeros(rows, dtype=np.int64),
            unstreamed=np.zeros(rows, dtype=np.bool_),
        )

    def __len__(self) -> int:
        return len(self.ttft_s)

    def select(self, indices: NDArray[np.intp] | NDArray[np.bool_] | slice) -> TrainingRows:
        """Return some of the rows. Their numbers are those of other rows, unless `indices` is a slice."""
        first_seq = self.first_seq + indices.indices(len(self))[0] if isinstance(indices, slice) else self.first_seq
        columns: dict[str, Any] = {name: getattr(self, name)[indices] for name in COLUMNS}
        return TrainingRows(self.names, **columns, first_seq=first_seq)

    @staticmethod
    def concat(parts: Sequence[TrainingRows]) -> TrainingRows:
        """Return the rows of all parts, which have the same features. At least one part."""
        first = parts[0]
        assert all(part.names == first.names for part in parts), "parts of one training have the same features"
        columns: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in COLUMNS}
        return TrainingRows(first.names, **columns, first_seq=first.first_seq)


#: Fields of `TrainingRows` with an entry per row.
COLUMNS = tuple(item.name for item in fields(TrainingRows) if item.name not in ("names", "first_seq"))


class OutcomeRing:
    """The newest outcomes, numbered from 0 without gaps.

    Parameters
    ----------
    names:
        Features of a row.
    capacity:
        Rows stored; a reader that lags misses older ones.

    Example
    -------
    >>> ring = OutcomeRing(("prompt_tokens",), capacity=2)
    >>> for second in range(3):
    ...     ring.append(np.array([7.0]), OutcomeRow(second, 0.5, 2.0, 7.0, slot=0, censored=False))
    >>> rows = ring.since(0)
    >>> rows.first_seq, rows.dispatched_s.tolist(), ring.next_seq
    (1, [1.0, 2.0], 3)
    """

    def __init__(self, names: tuple[str, ...], capacity: int = OUTCOMES) -> None:
        self.names = names
        self.capacity = capacity
        #: Number of the next row.
        self.next_seq = 0
        self._count = 0
        self._rows = TrainingRows.empty(names, capacity)

    def __len__(self) -> int:
        return self._count

    @property
    def first_seq(self) -> int:
        """Number of the oldest row stored; the next one if the ring is empty."""
        return self.next_seq - len(self)

    def append(self, features: NDArray[np.floating], row: OutcomeRow) -> None:
        """Add a row, in place of the oldest one if the ring is full."""
        rows, cell = self._rows, self.next_seq % self.capacity
        rows.features[cell] = features
        rows.dispatched_s[cell] = row.dispatched_s
        rows.ttft_s[cell] = row.ttft_s
        rows.tpot_s[cell] = row.tpot_s
        rows.e2e_s[cell] = row.e2e_s
        rows.output_tokens[cell] = row.output_tokens
        rows.cached_tokens[cell] = row.cached_tokens
        rows.prompt_tokens[cell] = row.prompt_tokens
        rows.censored[cell] = row.censored
        rows.slots[cell] = row.slot
        rows.groups[cell] = row.group
        rows.unstreamed[cell] = row.unstreamed
        self.next_seq += 1
        self._count = min(self._count + 1, self.capacity)

    def extend(self, more: TrainingRows) -> None:
        """Add the rows of another process of this router; those of other features, as of a policy before, are none."""
        if more.names != self.names:
            return
        more = more.select(slice(max(0, len(more) - self.capacity), len(more)))
        cells = np.arange(self.next_seq, self.next_seq + len(more)) % self.capacity
        for name in COLUMNS:
            getattr(self._rows, name)[cells] = getattr(more, name)
        self.next_seq += len(more)
        self._count = min(self._count + len(more), self.capacity)

    def restore(self, before: TrainingRows) -> None:
        """Put the rows of a former process before those that there are, whose numbers go on from theirs.

        Raises `ConfigError` for rows of other features.
        """
        if before.names != self.names:
            raise ConfigError(f"outcomes of features {', '.join(before.names)}; expected {', '.join(self.names)}")
        rows = TrainingRows.concat([before, self.since(0)])
        rows = rows.select(slice(max(0, len(rows) - self.capacity), len(rows)))
        self.next_seq, self._count = rows.first_seq + len(rows), len(rows)
        cells = np.arange(rows.first_seq, self.next_seq) % self.capacity
        for name in COLUMNS:
            getattr(self._rows, name)[cells] = getattr(rows, name)

    def since(self, seq: int, limit: int | None = None) -> TrainingRows:
        """Return copies of the rows from number `seq` on, at most `limit`.

        `first_seq` of the result is greater than `seq` if some of them are no longer stored.
        """
        first = min(max(seq, self.first_seq), self.next_seq)
        end = self.next_seq if limit is None else min(self.next_seq, first + limit)
        return replace(self._rows.select(np.arange(first, end) % self.capacity), first_seq=first)

    def check(self) -> None:
        """Assert that every stored row is one that an attempt can leave."""
        rows = self.since(0)
        assert len(rows) == len(self), "rows are numbered without gaps"
        assert (rows.ttft_s >= 0.0).all(), "a first token follows its dispatch"
        assert (rows.e2e_s >= rows.ttft_s).all(), "an end follows the first token"
        assert np.isfinite(rows.features).all(), "a feature is a number"
