"""What a feed wants done, in order."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Apply:
    """Decode a message and pass its events to the Router; `era` is for `Knowledge.emptied` and `spoiled`."""

    payload: bytes
    era: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Forget the blocks of this feed; `restarted`: the cache is empty, for it is that of a new process."""

    restarted: bool = False


@dataclass(frozen=True, slots=True)
class Replay:
    """Request the messages from number `start` on, instead of any replay that runs."""

    start: int
    generation: int


FeedAction = Apply | Forget | Replay
