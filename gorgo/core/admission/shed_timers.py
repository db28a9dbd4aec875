"""Times at which queued requests may have become infeasible, in a heap; entries that left the queue are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from math import inf

from gorgo.core.admission.queue import FairQueue, QueuedRequest


class ShedTimers:
    """One timer per queued request with a deadline.

    Parameters
    ----------
    queue:
        Of the requests.
    """

    __slots__ = ("_queue", "_times")

    def __init__(self, queue: FairQueue) -> None:
        self._queue = queue
        self._times: list[tuple[float, int, QueuedRequest]] = []

    def __len__(self) -> int:
        return len(self._times)

    def reset(self, queued: QueuedRequest, shed_at_s: float) -> None:
        """Move the timer of a request."""
        if shed_at_s != queued.shed_at_s:
            queued.shed_at_s = shed_at_s
            self.arm(queued)

    def arm(self, queued: QueuedRequest) -> None:
        """Set the timer of a request to its `shed_at_s`; none if infinite."""
        if queued.shed_at_s == inf:
            return
        heappush(self._times, (queued.shed_at_s, queued.number, queued))
        if len(self._times) > 4 * len(self._queue) + 64:
            self._times = [entry for entry in self._times if self._is_set(entry)]
            heapify(self._times)

    def next_s(self) -> float | None:
        """Return the first time."""
        while self._times and not self._is_queued(self._times[0][2]):
            heappop(self._times)
        return self._times[0][0] if self._times else None

    def due(self, *, now: float) -> Iterator[QueuedRequest]:
        """Yield the requests whose time has come; timers may be set meanwhile."""
        while self._times and self._times[0][0] <= now:
            queued = heappop(self._times)[2]
            if self._is_queued(queued) and queued.shed_at_s <= now:
                yield queued

    def clear(self) -> None:
        self._times.clear()

    def _is_set(self, entry: tuple[float, int, QueuedRequest]) -> bool:
        return self._is_queued(entry[2]) and entry[0] == entry[2].shed_at_s

    def _is_queued(self, queued: QueuedRequest) -> bool:
        return self._queue.get(queued.request_id) is queued
