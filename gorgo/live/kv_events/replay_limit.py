"""When a feed may request a replay, and how far the one that runs is."""

from __future__ import annotations

from dataclasses import dataclass

from gorgo.live.kv_feed_stats import FeedState

#: Time between a failed replay and the next one.
COOL_DOWN_S = 30.0
#: Replays in a row that each ended before a further hole: the publisher drops messages faster than it replays them.
MAX_REPLAYS = 4


@dataclass(slots=True)
class RunningReplay:
    """A replay that runs; `useless` are its further messages."""

    state: FeedState
    whole: bool
    began: bool = False
    useless: bool = False
    other_process: bool = False


class ReplayLimit:
    """Bounds the replays of one publisher.

    Example
    -------
    >>> limit = ReplayLimit(offered=True)
    >>> limit.fail(now=5.0), limit.is_cool(now=5.0 + COOL_DOWN_S / 2), limit.is_cool(now=5.0 + COOL_DOWN_S)
    (True, False, True)
    """

    def __init__(self, *, offered: bool) -> None:
        self.offered = offered
        self._in_a_row = 0
        self._hot_until_s = float("-inf")

    def is_cool(self, *, now: float) -> bool:
        """Return whether the publisher offers replays, and no replay has failed lately."""
        return self.offered and now >= self._hot_until_s

    def may_replay(self, *, now: float) -> bool:
        return self.is_cool(now=now) and self._in_a_row < MAX_REPLAYS

    def count(self) -> None:
        """Count a replay of a row."""
        self._in_a_row += 1

    def end_row(self) -> None:
        self._in_a_row = 0

    def fail(self, *, now: float) -> bool:
        """End a row without success; return whether it is news."""
        self._in_a_row = 0
        was_cool = self.is_cool(now=now)
        if was_cool:
            self._hot_until_s = now + COOL_DOWN_S
        return was_cool
