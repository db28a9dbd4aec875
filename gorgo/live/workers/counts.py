"""Counts that the workers of one router share in memory: open connections, and what each client uses of its quotas.

Owns the layout of the memory and the one rule that makes it need no lock: a worker writes its own row alone, and reads
those of the others.

Theory of operation. Each row has a head, then entries of clients, found by the hash of a name from its own place on
(linear probing). An entry is claimed by its worker and never freed, so a reader needs no more than the hash. Two
workers may admit the last request of a client at once, since each has read before the other wrote. So of n workers at
most n - 1 requests are admitted beyond a limit. An entry has what is in flight now, and what was spent since the start:
each worker takes what the others have spent since it last read out of its own rates.
"""

from __future__ import annotations

import mmap
import os
from hashlib import blake2b

import numpy as np

#: Entries of a row: twice as many clients as a router counts (`core.limits.MAX_CLIENTS`), so that searches are short.
ENTRIES = 8192
#: Cells of an entry: hash of the name, in flight, requests and tokens spent since the start; and the allowance as
#: numbers with a fraction: requests and tokens left, and as of when, s.
_KEY, _IN_FLIGHT, _REQUESTS, _TOKENS, _LEFT, _FILLED = 0, 1, 2, 3, 4, 6
_CELLS = 8
#: Cells of the head: open connections.
_HEAD = 8
_CONNECTIONS, _NOT_SERVING = 0, -1
_ROW = _HEAD + ENTRIES * _CELLS


def shared_bytes(workers: int) -> int:
    """Return the size of the counts."""
    return workers * _ROW * 8


def make_memory(workers: int, *, more: int = 0) -> int:
    """Return the descriptor of new memory, which the workers inherit; with so many bytes `more` behind the counts."""
    descriptor = os.memfd_create("gorgo-counts")
    os.ftruncate(descriptor, shared_bytes(workers) + more)
    os.set_inheritable(descriptor, True)
    return descriptor


class SharedCounts:
    """The counts of all workers, seen from one of them.

    Example
    -------
    >>> memory = make_memory(2)
    >>> a, b = SharedCounts(memory, 2, own=0), SharedCounts(memory, 2, own=1)
    >>> a.set_in_flight("chat", 3), a.spend("chat", requests=1, tokens=200)
    (None, None)
    >>> b.in_flight_of_others("chat"), b.spent_by_others("chat"), a.in_flight_of_others("chat")
    (3, (1, 200), 0)
    """

    def __init__(self, descriptor: int, workers: int, *, own: int) -> None:
        self._memory = mmap.mmap(descriptor, shared_bytes(workers))
        self._rows = np.frombuffer(self._memory, dtype=np.int64).reshape(workers, _ROW)
        self._floats = self._rows.view(np.float64)
        self._own = own
        self._others = [number for number in range(workers) if number != own]
        #: Of names that were counted before.
        self._keys: dict[str, tuple[int, int]] = {}

    def reset(self, worker: int) -> None:
        """Count nothing as open or in flight at a worker that does not serve. What was spent stays spent."""
        counts = self._rows[worker]
        counts[:_HEAD] = 0
        counts[_CONNECTIONS] = _NOT_SERVING
        counts[_HEAD + _IN_FLIGHT :: _CELLS] = 0

    # -- connections

    def set_connections(self, count: int) -> None:
        self._rows[self._own, _CONNECTIONS] = count

    def least_connections_of_others(self) -> int:
        """Return the open connections of the other worker that has the fewest, of those that serve."""
        connections = [
            count for other in self._others if (count := int(self._rows[other, _CONNECTIONS])) != _NOT_SERVING
        ]
        return min(connections, default=2**31)

    # -- clients

    def set_in_flight(self, client: str, count: int) -> None:
        offset = self._claimed(client)
        if offset is not None:
            self._rows[self._own, offset + _IN_FLIGHT] = count

    def spend(self, client: str, *, requests: int = 0, tokens: int = 0) -> None:
        """Add to what a client has spent here."""
        offset = self._claimed(client)
        if offset is not None:
            counts = self._rows[self._own]
            counts[offset + _REQUESTS] += requests
            counts[offset + _TOKENS] += tokens

    def set_allowance(self, client: str, requests: float, tokens: float, filled_s: float) -> None:
        """Set what is left to a client here, as of `filled_s`."""
        offset = self._claimed(client)
        if offset is not None:
            self._floats[self._own, offset + _LEFT : offset + _FILLED + 1] = requests, tokens, filled_s

    def allowances_of_others(self, client: str) -> list[tuple[float, float, float]]:
        """Return what is left to a client, and as of when, by each other worker that counts it."""
        allowances = []
        for other, offset in self._found(client):
            requests, tokens, filled_s = self._floats[other, offset + _LEFT : offset + _FILLED + 1].tolist()
            if filled_s:
                allowances.append((requests, tokens, filled_s))
        return allowances

    def in_flight_of_others(self, client: str) -> int:
        """Return the requests of a client in flight at the other workers."""
        return sum(int(self._rows[other, offset + _IN_FLIGHT]) for other, offset in self._found(client))

    def spent_by_others(self, client: str) -> tuple[int, int]:
        """Return the requests and tokens that a client has spent at the other workers since their start."""
        entries = list(self._found(client))
        requests = sum(int(self._rows[other, offset + _REQUESTS]) for other, offset in entries)
        return requests, sum(int(self._rows[other, offset + _TOKENS]) for other, offset in entries)

    def _found(self, client: str) -> list[tuple[int, int]]:
        entries = []
        for other in self._others:
            offset = self._place(other, client)
            if offset is not None and self._rows[other, offset] != 0:
                entries.append((other, offset))
        return entries

    def _claimed(self, client: str) -> int | None:
        """Return the own entry of a client; `None` if no entry is free, as after thousands of reloaded keys."""
        offset = self._place(self._own, client)
        if offset is not None:
            self._rows[self._own, offset] = self._key(client)[0]
        return offset

    def _place(self, worker: int, client: str) -> int | None:
        """Return the entry of a client, or the free one where it would be."""
        key, first = self._key(client)
        counts = self._rows[worker]
        for step in range(ENTRIES):
            offset = _HEAD + (first + step) % ENTRIES * _CELLS
            if counts[offset] in (0, key):
                return offset
        return None

    def _key(self, client: str) -> tuple[int, int]:
        hashed = self._keys.get(client)
        if hashed is None:
            if len(self._keys) >= ENTRIES:
                self._keys.clear()
            number = int.from_bytes(blake2b(client.encode(), digest_size=8).digest(), "little", signed=True) or 1
            hashed = self._keys[client] = number, number % ENTRIES
        return hashed
