"""The way of reports from one replica to the router: one trip each, in order, and what can go wrong.

Owns delivery times and faults of the way. `reports` has the messages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from gorgo.lab.sim.event_queue import EventQueue
from gorgo.lab.sim.network import TripDelays
from gorgo.lab.sim.port import Reachable


@dataclass(frozen=True, slots=True, kw_only=True)
class PathFaults:
    """What happens to messages that are sent from now on.

    Parameters
    ----------
    lost, doubled, reordered:
        Shares of messages that never arrive, arrive twice, or arrive `reordered_s` later than those behind them.
    late_s:
        Added to each trip.
    cut:
        No message arrives, in either direction. Requests are served.
    """

    lost: float = 0.0
    doubled: float = 0.0
    reordered: float = 0.0
    reordered_s: float = 0.5
    late_s: float = 0.0
    cut: bool = False


@dataclass(slots=True)
class PathTotals:
    """Messages sent, and what they carried."""

    messages: int = 0
    hashes: int = 0
    tokens: int = 0
    #: Time from each eviction to its application, s.
    eviction_delays_s: list[float] = field(default_factory=list)


class ReportPath:
    """Carries messages of one replica to the router.

    Parameters
    ----------
    kernel, replica, trips:
        Event queue, the other end, and delays of these trips.
    instant:
        Whether a message arrives in the moment in which it is sent, for full knowledge.
    """

    def __init__(self, kernel: EventQueue, replica: Reachable, trips: TripDelays, *, instant: bool = False) -> None:
        self._kernel = kernel
        self._replica = replica
        self._trips = trips
        self._instant = instant
        self._last_arrival_s = 0.0
        self.faults = PathFaults()
        self.totals = PathTotals()

    @property
    def now(self) -> float:
        return self._kernel.now

    @property
    def is_open(self) -> bool:
        """Whether messages pass."""
        return self._replica.alive and not self.faults.cut

    def carry(self, deliver: Callable[[], None]) -> None:
        """Carry a message, unless it is lost."""
        faults = self.faults
        if not self.is_open or self._happens(faults.lost):
            return
        copies = 2 if self._happens(faults.doubled) else 1
        arrival_s = max(self._last_arrival_s, self._kernel.now + self.trip_s())
        if self._happens(faults.reordered):
            arrival_s += faults.reordered_s
        else:
            self._last_arrival_s = arrival_s
        for _ in range(copies):
            self._kernel.at(arrival_s, deliver)

    def request(
        self, answer: Callable[[], Callable[[], None]], unanswered: Callable[[], None], *, give_up_s: float
    ) -> None:
        """Carry a request to the replica and its answer back; call `unanswered` after `give_up_s` if the way is cut."""
        if not self.is_open:
            self._kernel.at(self._kernel.now + give_up_s, unanswered)
            return
        self._kernel.at(self._kernel.now + self.trip_s(), partial(self._answer, answer, unanswered, give_up_s))

    def trip_s(self) -> float:
        """Return the time of the next trip."""
        return 0.0 if self._instant else self._trips.one_way_s(self._replica.link) + self.faults.late_s

    def after(self, seconds: float, handler: Callable[[], None]) -> None:
        self._kernel.at(self._kernel.now + seconds, handler)

    def _answer(
        self, answer: Callable[[], Callable[[], None]], unanswered: Callable[[], None], give_up_s: float
    ) -> None:
        if self.is_open:
            self._kernel.at(max(self._last_arrival_s, self._kernel.now + self.trip_s()), answer())
        else:
            self._kernel.at(self._kernel.now + give_up_s, unanswered)

    def _happens(self, share: float) -> bool:
        return share > 0.0 and self._trips.uniform() < share
