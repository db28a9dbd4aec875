"""The state of a router's link to its store: joined or alone, and why; one log line per change."""

from __future__ import annotations

import logging
from typing import Literal

from gorgo.core.backoff import backoff_s
from gorgo.live.clock import Clock
from gorgo.live.logs import log
from gorgo.live.peer_store.faults import fault_of
from gorgo.live.telemetry.peer_table import StoreFault
from gorgo.live.telemetry.peers import PeerCounts

#: Between a failure and the next try: short, because knowledge is to be back soon; longer while the store is gone.
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.1, 2.0

Direction = Literal["write", "read"]


class StoreLink:
    """Whether reports are written and read.

    Parameters
    ----------
    url:
        The store's, for the log.
    """

    def __init__(self, url: str, counts: PeerCounts, clock: Clock) -> None:
        self._url = url
        self._counts = counts
        self._clock = clock
        self._faults: dict[Direction, StoreFault] = {}
        #: Directions without a command that has succeeded yet.
        self._untried: set[Direction] = {"write", "read"}
        self._failures: dict[Direction, int] = {"write": 0, "read": 0}
        #: Text of the last failure.
        self.error: str | None = None
        self.since_s = clock()

    @property
    def joined(self) -> bool:
        return not self._faults and not self._untried

    @property
    def fault(self) -> StoreFault | None:
        """Return why the router is alone; `None` if it is not, or has not tried yet."""
        return next(iter(self._faults.values()), None)

    def fails(self, direction: Direction) -> bool:
        return direction in self._faults

    def on_success(self, direction: Direction) -> None:
        before = self.joined
        self._faults.pop(direction, None)
        self._untried.discard(direction)
        self._failures[direction] = 0
        if self.joined and not before:
            log("peer_store_joined", store=self._url, after_s=round(self._clock() - self.since_s, 1))
            self.since_s, self.error = self._clock(), None

    def on_failure(self, direction: Direction, error: Exception, *, chance: float) -> float:
        """Return after how many seconds to try again; `chance` is in [0, 1)."""
        fault, alone = fault_of(error), bool(self._faults)
        if self.joined:
            self.since_s = self._clock()
        self._counts.failures[fault] += 1
        self._faults[direction], self.error = fault, f"{type(error).__name__}: {error}"[:300]
        if not alone:
            log("peer_store_lost", level=logging.WARNING, store=self._url, reason=fault, error=self.error)
        self._failures[direction] += 1
        return backoff_s(self._failures[direction], first_s=FIRST_BACKOFF_S, longest_s=MAX_BACKOFF_S, chance=chance)
