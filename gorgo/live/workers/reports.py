"""Reports of the workers of one router in the memory that they share: a ring for each, which it alone writes.

Owns the layout of the rings. Leaves what a report says, and when to read, to `peer_store.local`.

Theory of operation. Nobody is woken by a report: a worker reads those of the others at its own turn and before a
decision, which costs one comparison where nothing has come. Each ring has a head, then bytes. `end` counts all bytes
that were ever written, and is set after them; `last` is where the last report begins. A report has its size and a
checksum before it, so what was overwritten while it was read is not taken for a report. A reader that the writer has
lapped goes on with the last report: it misses what the next ones do not repeat, and nobody waits for it.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from zlib import crc32

from gorgo.live.workers.counts import shared_bytes

#: Bytes of a ring: half a second of a worker with thousands of prompts a second, and any single report.
RING_BYTES = 4 << 20
#: `last` and `end`, each a number of 8 bytes.
_HEAD_BYTES = 64
_LAST, _END = 0, 1
#: Size and checksum of a report.
_PREFIX = struct.Struct("=II")
_ROW_BYTES = _HEAD_BYTES + RING_BYTES


def reports_bytes(workers: int) -> int:
    """Return the size of the rings, which lie behind the counts."""
    return workers * _ROW_BYTES


class SharedReports:
    """The reports of all workers, seen from one of them. What was written before is no news to it.

    Example
    -------
    >>> from gorgo.live.workers.counts import make_memory
    >>> memory = make_memory(2, more=reports_bytes(2))
    >>> a, b = SharedReports(memory, 2, own=0), SharedReports(memory, 2, own=1)
    >>> a.write(b"one"), a.write(b"two")
    (True, True)
    >>> list(b.read()), list(b.read()), list(a.read())
    ([(0, b'one'), (0, b'two')], [], [])
    """

    def __init__(self, descriptor: int, workers: int, *, own: int) -> None:
        start = shared_bytes(workers)
        self._memory = memoryview(mmap.mmap(descriptor, start + reports_bytes(workers)))[start:]
        self._heads = [
            self._memory[at : at + _HEAD_BYTES].cast("q") for at in range(0, workers * _ROW_BYTES, _ROW_BYTES)
        ]
        self._rings = [
            self._memory[at + _HEAD_BYTES : at + _ROW_BYTES] for at in range(0, workers * _ROW_BYTES, _ROW_BYTES)
        ]
        self._own = own
        #: Up to where each other worker's ring was read, and how often a reader was lapped.
        self._read = {number: head[_END] for number, head in enumerate(self._heads) if number != own}
        self.lapped = 0

    def write(self, report: bytes) -> bool:
        """Write a report; return whether the ring has room for one of its size."""
        frame = _PREFIX.pack(len(report), crc32(report)) + report
        if len(frame) > RING_BYTES:
            return False
        head, ring = self._heads[self._own], self._rings[self._own]
        begin = head[_END]
        at = begin % RING_BYTES
        first = frame[: RING_BYTES - at]
        ring[at : at + len(first)] = first
        ring[: len(frame) - len(first)] = frame[len(first) :]
        head[_LAST] = begin
        head[_END] = begin + len(frame)
        return True

    def read(self) -> Iterator[tuple[int, bytes]]:
        """Yield the worker and content of each report that has come since the last call, in the order of each."""
        for worker, begin in self._read.items():
            if self._heads[worker][_END] != begin:
                yield from self._read_ring(worker, begin)

    def skip(self, worker: int) -> None:
        """Take what a worker has written so far as read."""
        if worker in self._read:
            self._read[worker] = self._heads[worker][_END]

    def _read_ring(self, worker: int, begin: int) -> Iterator[tuple[int, bytes]]:
        head = self._heads[worker]
        end = head[_END]
        if end - begin > RING_BYTES:
            self.lapped += 1
            begin = head[_LAST]
        self._read[worker] = end
        while begin < end:
            size, checksum = _PREFIX.unpack(self._bytes_at(worker, begin, _PREFIX.size))
            begin += _PREFIX.size
            report = self._bytes_at(worker, begin, size) if size <= RING_BYTES else b""
            if crc32(report) != checksum or len(report) != size:
                self.lapped += 1  # it was overwritten in the meantime, and so were those before `end`
                return
            begin += size
            yield worker, report

    def _bytes_at(self, worker: int, begin: int, size: int) -> bytes:
        ring, at = self._rings[worker], begin % RING_BYTES
        first = ring[at : at + size]
        return bytes(first) if len(first) == size else bytes(first) + bytes(ring[: size - len(first)])
