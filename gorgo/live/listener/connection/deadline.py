"""One timer for all deadlines of a connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf


class Deadline:
    """Calls `expired` once the deadline has passed.

    A later deadline is only a number, which the timer reads when it fires: a request sets and clears one without a
    timer of its own.
    """

    __slots__ = ("_expired", "_loop", "_timer", "_when")

    def __init__(self, loop: asyncio.AbstractEventLoop, expired: Callable[[], None]) -> None:
        self._loop = loop
        self._expired = expired
        self._when = inf
        self._timer: asyncio.TimerHandle | None = None

    def set(self, delay_s: float) -> None:
        self._when = self._loop.time() + delay_s
        if self._timer is None or self._timer.when() > self._when:
            self._arm()

    def unset(self) -> None:
        self._when = inf

    def cancel(self) -> None:
        """End the timer too."""
        self._when = inf
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._when, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._loop.time() >= self._when:
            self._when = inf
            self._expired()
        elif self._when < inf:
            self._arm()
