"""Coalesces the writes of a busy event loop, to clients and to replicas: those of one turn are done in the next.

Owns when connections write, not what: a connection has its bytes from the step in which they came.

Theory of operation. A write to a process that sleeps wakes it, which in a virtual machine takes as long as relaying an
event. Written as they are made, bytes come more slowly than a peer of many connections takes them, so that each write
finds it asleep. Queued for the next turn they wake it once, and what it sends back comes together too, so the next turn
has more to do with the same code, which is then in the processor's caches. A loop that has little to do queues nothing:
there each write is a turn earlier, and a turn costs more than a wake-up.
"""

from __future__ import annotations

import asyncio
from math import inf
from typing import Protocol
from weakref import WeakKeyDictionary

#: Writes are counted for so long, s.
WINDOW_S = 0.010
#: From so many in a window the loop is busy. Streams of 50 events/s reach it at 48; then a turn is under a millisecond.
BUSY_WRITES = 24
#: Connections that write together: half a millisecond.
MAX_CONNECTIONS = 64


class HasWaitingBytes(Protocol):
    """A connection with bytes to write."""

    loop: asyncio.AbstractEventLoop

    def write_waiting(self) -> None:
        """Write what waits, unless the connection has ended."""


class TurnWrites:
    """The connections of an event loop whose bytes wait for the next turn."""

    __slots__ = ("_begun_s", "_is_busy", "_waiting", "_writes")

    def __init__(self) -> None:
        self._waiting: list[HasWaitingBytes] = []
        #: Start of the window, its writes so far, and whether the window before it had many.
        self._begun_s = -inf
        self._writes = 0
        self._is_busy = False

    def are_many(self, now: float) -> bool:
        """Count a write at the loop's time; return whether it waits for the others of its turn."""
        passed_s = now - self._begun_s
        if passed_s >= WINDOW_S:
            self._is_busy = self._writes >= BUSY_WRITES and passed_s < 2 * WINDOW_S
            self._begun_s, self._writes = now, 0
        self._writes += 1
        return self._is_busy or self._writes >= BUSY_WRITES

    def add(self, writer: HasWaitingBytes) -> None:
        """Call `writer` in the next turn; once for each call."""
        waiting = self._waiting
        waiting.append(writer)
        if len(waiting) == 1:
            writer.loop.call_soon(self.flush)
        elif len(waiting) == MAX_CONNECTIONS:
            self.flush()

    def flush(self) -> None:
        """Write now."""
        waiting, self._waiting = self._waiting, []
        for writer in waiting:
            writer.write_waiting()


_OF_LOOP: WeakKeyDictionary[asyncio.AbstractEventLoop, TurnWrites] = WeakKeyDictionary()


def writes_of(loop: asyncio.AbstractEventLoop) -> TurnWrites:
    """Return the one that all connections of a loop share."""
    found = _OF_LOOP.get(loop)
    if found is None:
        found = _OF_LOOP[loop] = TurnWrites()
    return found
