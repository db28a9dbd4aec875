"""State and counts of the feeds of one replica, for metrics, status and logs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class FeedState(StrEnum):
    """State of a feed, the best first.

    `live`: all events are known. `waiting`: none has come yet. `off`: not configured, or not offered by the engine.
    `restarted`, `gap`: a replay is running, or none is possible yet. `partial`: events before the subscription, or in a
    gap, are missing. `silent`: connected, requests were served, and no event came. `cut`: no connection.
    """

    LIVE = "live"
    WAITING = "waiting"
    OFF = "off"
    RESTARTED = "restarted"
    GAP = "gap"
    PARTIAL = "partial"
    SILENT = "silent"
    CUT = "cut"


_ORDER = list(FeedState)


@dataclass(slots=True)
class KvFeedStats:
    """The feeds of one replica, one per data-parallel rank.

    Parameters
    ----------
    state:
        The worst state of a rank.
    complete:
        Whether the events of every rank describe its whole cache.
    endpoints:
        Addresses of the events.
    advice:
        What to change at the engine or in regions.yaml, if no events come.
    messages, bytes, events:
        Received, replays included.
    rejected_messages, rejected_events:
        Could not be decoded.
    gaps, restarts, replays, failed_replays:
        Since the subscription.
    last_message_s:
        Time of the last message, by the proxy's clock.
    """

    state: FeedState = FeedState.OFF
    complete: bool = False
    endpoints: tuple[str, ...] = ()
    advice: str | None = None
    messages: int = 0
    bytes: int = 0
    events: int = 0
    rejected_messages: int = 0
    rejected_events: int = 0
    gaps: int = 0
    restarts: int = 0
    replays: int = 0
    failed_replays: int = 0
    last_message_s: float | None = None


def worst(states: Iterable[FeedState]) -> FeedState:
    """Return the state of a replica whose feeds have `states`.

    >>> worst([FeedState.LIVE, FeedState.GAP]).value
    'gap'
    """
    found = set(states)
    return found.pop() if len(found) == 1 else max(found, key=_ORDER.index, default=FeedState.OFF)
