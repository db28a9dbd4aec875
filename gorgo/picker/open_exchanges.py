"""Exchanges that Envoy has open, and those that have ended and wait for their entry of the access log.

Owns ids, both bounds of time, and the bound of their number. An exchange of which no end is heard is expired, since a
lost one would count as load for ever.
"""

from __future__ import annotations

import asyncio
from collections import deque
from itertools import count
from typing import Protocol

from gorgo.live.clock import Clock

#: Longest wait for the entry of an ended exchange, s: Envoy sends entries every 50 ms.
ENTRY_S = 1.0
#: Ended exchanges that wait: a second of four thousand a second. One more closes the oldest.
MAX_WAITING = 4096
#: Between two searches for exchanges that have outlived their time, s.
SWEEP_S = 5.0


class Expiring(Protocol):
    """An exchange."""

    exchange_id: str
    #: Time by which Envoy must have ended it.
    expires_s: float

    def on_timeout(self) -> None:
        """End it: its time has passed."""
        ...

    def close(self) -> None:
        """Close an ended one without its entry."""
        ...


class OpenExchanges:
    """Exchanges by id."""

    def __init__(self, clock: Clock, *, picker: str) -> None:
        self._clock = clock
        self._prefix = f"{picker}-"
        self._numbers = count(1)
        self._by_id: dict[str, Expiring] = {}
        self._waiting: deque[tuple[float, Expiring]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._sweeper: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._by_id)

    def next_id(self) -> str:
        """Return an id that no other exchange of any picker has."""
        return f"{self._prefix}{next(self._numbers)}"

    def is_own(self, exchange_id: str) -> bool:
        """Return whether this picker could have given the id."""
        return exchange_id.startswith(self._prefix)

    def add(self, exchange: Expiring) -> None:
        """Add a dispatched exchange."""
        self._by_id[exchange.exchange_id] = exchange
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)

    def get(self, exchange_id: str) -> Expiring | None:
        return self._by_id.get(exchange_id)

    def remove(self, exchange: Expiring) -> None:
        """Remove a closed exchange. Idempotent."""
        self._by_id.pop(exchange.exchange_id, None)

    def await_entry(self, exchange: Expiring) -> None:
        """Close an ended exchange after `ENTRY_S`, unless it is removed before."""
        while self._waiting and self._is_done(self._waiting[0][1]):
            self._waiting.popleft()
        self._waiting.append((self._clock() + ENTRY_S, exchange))
        if len(self._waiting) > MAX_WAITING:
            self._close_first()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(ENTRY_S, self._close_due)

    def aclose(self) -> None:
        """Close what has ended, and cancel the timers."""
        while self._waiting:
            self._close_first()
        for timer in (self._timer, self._sweeper):
            if timer is not None:
                timer.cancel()
        self._timer = self._sweeper = None

    def _close_first(self) -> None:
        _, exchange = self._waiting.popleft()
        if self._by_id.get(exchange.exchange_id) is exchange:
            exchange.close()

    def _close_due(self) -> None:
        self._timer = None
        now = self._clock()
        while self._waiting and (self._waiting[0][0] <= now or self._is_done(self._waiting[0][1])):
            self._close_first()
        if self._waiting:
            wait_s = max(0.0, self._waiting[0][0] - now)
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._close_due)

    def _is_done(self, exchange: Expiring) -> bool:
        return exchange.exchange_id not in self._by_id

    def _sweep(self) -> None:
        self._sweeper = None
        now = self._clock()
        for exchange in [each for each in self._by_id.values() if each.expires_s <= now]:
            exchange.on_timeout()
        if self._by_id:
            self._sweeper = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)
