"""Virtual time: a heap of (time, sequence, handler), nothing else.

Owns the order of events: by time, and events of the same time in the order in which they were scheduled. Nothing is
random and no machine clock is read, so a run is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from math import inf

Handler = Callable[[], None]


class EventQueue:
    """Runs handlers in the order of their times.

    Example
    -------
    >>> kernel, seen = EventQueue(), []
    >>> kernel.at(2.0, lambda: seen.append(("later", kernel.now)))
    >>> kernel.at(1.0, lambda: seen.append(("first", kernel.now)))
    >>> kernel.run()
    >>> seen
    [('first', 1.0), ('later', 2.0)]
    """

    def __init__(self) -> None:
        #: The time of the event that is handled, or was last, s.
        self.now = 0.0
        #: Events handled so far.
        self.handled = 0
        self._heap: list[tuple[float, int, Handler]] = []
        self._sequence = 0
        self._stopped = False

    def __len__(self) -> int:
        """Events to come."""
        return len(self._heap)

    def at(self, time_s: float, handler: Handler) -> None:
        """Call `handler` at `time_s`, which must not have passed."""
        assert time_s >= self.now, "time does not run backwards"
        self._sequence += 1
        heappush(self._heap, (time_s, self._sequence, handler))

    def every(self, interval_s: float, handler: Handler) -> None:
        """Call `handler` after each interval, until the run ends."""
        assert interval_s > 0.0, "time passes in between"

        def act() -> None:
            handler()
            self.at(self.now + interval_s, act)

        self.at(self.now + interval_s, act)

    def run(self, until_s: float = inf) -> None:
        """Handle events up to and with `until_s`, until none is left or `stop` is called."""
        heap = self._heap
        self._stopped = False
        while heap and heap[0][0] <= until_s and not self._stopped:
            self.now, _, handler = heappop(heap)
            self.handled += 1
            handler()

    def stop(self) -> None:
        """End `run` after the event that is being handled."""
        self._stopped = True
