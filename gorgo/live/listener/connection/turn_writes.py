"""The events that the connections of a listener write in one turn of the event loop, done one after the other.

Owns when they are written, not what: a connection has its bytes from the step in which they came.

Theory of operation. A write to a client that sleeps wakes it, which in a virtual machine takes as long as the rest of
an event. Written as they are read, events come more slowly than a client of many streams takes them, so that each of
them finds it asleep. Read first and then written together they wake it once. The last event of a turn waits for all
others in either case.
"""

from __future__ import annotations

import asyncio
from math import inf
from typing import Protocol

#: Up to so many events in a turn are written at once: alone an event would wait for nothing, and cost a callback.
FEW_EVENTS = 32
#: Connections that write together: half a millisecond.
MAX_CONNECTIONS = 64
#: Bytes of a connection that may wait, all copied for each further event: an event of an engine has some hundred.
MAX_BYTES = 4096


class HasWaitingBytes(Protocol):
    """A connection with bytes to write."""

    loop: asyncio.AbstractEventLoop

    def write_waiting(self) -> None:
        """Write what waits, unless the connection has ended."""


class TurnWrites:
    """The connections of a listener whose bytes wait for the end of the turn."""

    __slots__ = ("_events", "_turn_s", "_waiting")

    def __init__(self) -> None:
        self._waiting: list[HasWaitingBytes] = []
        #: Start of the turn, and its events so far.
        self._turn_s = -inf
        self._events = 0

    def are_many(self, now: float) -> bool:
        """Count an event; return whether the turn has so many that they are written together.

        `now` is the loop's time: uvloop's is that of the turn's start, in milliseconds. asyncio's own goes on, and no
        turn has many.
        """
        if now != self._turn_s:
            self._turn_s, self._events = now, 0
            return False
        self._events += 1
        return self._events >= FEW_EVENTS

    def add(self, writer: HasWaitingBytes) -> None:
        """Call `writer` at the end of the turn; once for each call."""
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
