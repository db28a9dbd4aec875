"""What one engine has pushed: its run, the order of its pushes, its rate, and whether it is silent. Pure.

Theory of operation. A push has the engine's run (`epoch`) and its place in that run (`sequence`). A push of an earlier
run, or one that is overtaken, changes nothing: a later one has been applied. A place that is skipped is a lost push,
which the next snapshot repairs. A source without a snapshot for `SILENT_S` is forgotten with its run, so that an engine
whose clock went back is accepted again; no body takes as long to arrive.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

#: Three snapshots, at one each 5 s.
SILENT_S = 15.0
#: Hashes of one push: a cache of 16 million tokens in blocks of 16.
MAX_HASHES = 1 << 20
#: Hashes per second of one engine: the largest snapshot each 5 s, and evictions. Each is a change of the index.
HASHES_PER_S = 1 << 18
#: Least cost of a push, in hashes: 256 pushes per second.
LEAST_HASHES = 1 << 10
#: An engine that starts, and one that repeats its snapshot after a lost push.
BURST_HASHES = 2 * MAX_HASHES


@dataclass(frozen=True, slots=True, eq=False)
class CachePush:
    """One push of an engine.

    Parameters
    ----------
    replica:
        Name of the engine's replica.
    model:
        `None` for all models of the replica, whose adapters have hashes of their own.
    block_tokens:
        Tokens per block.
    epoch:
        Run of the engine; a later run has a greater one.
    sequence:
        Place in the run, from 0 on by one.
    hashes:
        Own hashes (`core.prefix.kv_chain`), in any order.
    """

    replica: str
    model: str | None
    block_tokens: int
    epoch: int
    sequence: int
    hashes: NDArray[np.uint64]


class Order(Enum):
    """Place of a push among those before it."""

    NEXT = "next"
    #: Of a new run: what the earlier one pushed is void.
    NEW_RUN = "new_run"
    #: Overtaken, or of an earlier run.
    STALE = "stale"


@dataclass(slots=True)
class PushStats:
    """Pushes of one replica since it joined."""

    snapshots: int = 0
    evictions: int = 0
    #: Overtaken or of an earlier run; skipped places; beyond the rate; times without a snapshot for long.
    stale: int = 0
    lost: int = 0
    limited: int = 0
    silences: int = 0


@dataclass(slots=True, eq=False, weakref_slot=True)
class PushSource:
    """The pushes of one replica.

    Example
    -------
    >>> source = PushSource()
    >>> [source.order(1, place, now=0.0).value for place in (0, 2, 1)]
    ['new_run', 'next', 'stale']
    >>> source.stats.lost, source.stats.stale, source.needs_snapshot
    (1, 1, True)
    """

    #: `None` before the first push and after a silence.
    epoch: int | None = None
    sequence: int = -1
    #: Time of the last snapshot, or of the first push of a run without one.
    synced_s: float = 0.0
    #: Whether evictions may lack blocks to remove, or have been lost: a snapshot at once is worth its bytes.
    needs_snapshot: bool = True
    stats: PushStats = field(default_factory=PushStats)
    _allowance: float = BURST_HASHES
    _filled_s: float = 0.0

    def order(self, epoch: int, sequence: int, *, now: float) -> Order:
        """Record the place of a push."""
        if self.epoch is None or epoch > self.epoch:
            self.epoch, self.sequence, self.synced_s, self.needs_snapshot = epoch, sequence, now, True
            return Order.NEW_RUN
        if epoch < self.epoch or sequence <= self.sequence:
            self.stats.stale += 1
            return Order.STALE
        lost = sequence - self.sequence - 1
        if lost:
            self.stats.lost += lost
            self.needs_snapshot = True
        self.sequence = sequence
        return Order.NEXT

    def snapshot_applied(self, *, now: float) -> None:
        """Record a snapshot."""
        self.stats.snapshots += 1
        self.synced_s, self.needs_snapshot = now, False

    def charge(self, hashes: int, *, now: float) -> float:
        """Charge a push; return how long it has to wait, 0 for one within the rate."""
        self._allowance = min(BURST_HASHES, self._allowance + (now - self._filled_s) * HASHES_PER_S)
        self._filled_s = now
        cost = max(LEAST_HASHES, hashes)
        if cost > self._allowance:
            self.stats.limited += 1
            return (cost - self._allowance) / HASHES_PER_S
        self._allowance -= cost
        return 0.0

    def expire(self, *, now: float) -> bool:
        """Forget the run of a silent engine; return whether it has become silent."""
        if self.epoch is None or now - self.synced_s < SILENT_S:
            return False
        self.epoch, self.sequence, self.needs_snapshot = None, -1, True
        self.stats.silences += 1
        return True
