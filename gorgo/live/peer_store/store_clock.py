"""The store's clock, by which reports have an age: clocks of hosts may differ by any time."""

from __future__ import annotations

from gorgo.live.clock import Clock


class StoreClock:
    """Seconds by the store, carried on by a local clock since the last answer of the store.

    >>> clock = StoreClock(iter([10.0, 10.0, 12.0]).__next__)
    >>> clock.set_time(500.0, requested_s=clock.local())
    >>> clock.now()
    502.0
    """

    def __init__(self, local: Clock) -> None:
        self.local = local
        self._offset_s: float | None = None

    def set_time(self, store_s: float, *, requested_s: float) -> None:
        """Take the store's time, which it read between `requested_s` and now."""
        self._offset_s = store_s - (requested_s + self.local()) / 2.0

    def now(self) -> float | None:
        """Return the store's time; `None` before its first answer."""
        return None if self._offset_s is None else self.local() + self._offset_s

    def age_s(self, written_ms: int) -> float:
        """Return the age of what the store took at `written_ms`; 0 for what it took after this clock's time."""
        now = self.now()
        return 0.0 if now is None else max(0.0, now - written_ms / 1e3)
