"""Timers of replicas: the earliest of all, found without a visit to each."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush

from gorgo.core.fleet.replica import Replica


class FleetTimers:
    """One time per replica, which may be replaced.

    `next_s` is the earliest. A heap has each time that was set; one that was replaced is dropped when it comes to the
    front, or when more than half of the heap is obsolete.
    """

    __slots__ = ("_due", "_heap", "_number", "next_s")

    def __init__(self) -> None:
        self._due: dict[Replica, float] = {}
        self._heap: list[tuple[float, int, Replica]] = []
        self._number = 0
        #: Read at each event of a request, and changed by probes and scrapes alone.
        self.next_s: float | None = None

    def set(self, replica: Replica, due_s: float | None) -> None:
        """Replace a replica's time; `None` is none."""
        if due_s == self._due.get(replica):
            return
        if due_s is None:
            del self._due[replica]
            self.next_s = self._earliest_s()
            return
        self._due[replica] = due_s
        self._number += 1
        heappush(self._heap, (due_s, self._number, replica))
        if len(self._heap) > 64 + 2 * len(self._due):
            self._heap = [entry for entry in self._heap if self._due.get(entry[2]) == entry[0]]
            heapify(self._heap)
        self.next_s = self._earliest_s()

    def pop_due(self, *, now: float) -> Iterable[Replica]:
        """Remove the times until `now`; return their replicas in the order of slots."""
        due: list[Replica] = []
        while self.next_s is not None and self.next_s <= now:
            replica = heappop(self._heap)[2]
            del self._due[replica]
            due.append(replica)
            self.next_s = self._earliest_s()
        return sorted(due, key=lambda replica: replica.slot)

    def _earliest_s(self) -> float | None:
        heap = self._heap
        while heap:
            due_s, _, replica = heap[0]
            if self._due.get(replica) == due_s:
                return due_s
            heappop(heap)
        return None
