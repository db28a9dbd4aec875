"""What the messages applied so far tell of a publisher's cache."""

from __future__ import annotations

from gorgo.live.kv_events.actions import Apply, FeedAction, Forget
from gorgo.live.kv_events.position import Position


class Knowledge:
    """How much of a publisher's cache is known, and from which message on.

    Each time the blocks are forgotten an era ends; what a message of an earlier era told does not count any longer.

    Example
    -------
    >>> knowledge = Knowledge()
    >>> knowledge.advance(0, b"a")
    Apply(payload=b'a', era=0)
    >>> knowledge.end_era(), knowledge.end_era()
    ([Forget(restarted=False)], [])
    >>> knowledge.emptied(0), knowledge.complete
    (None, False)
    """

    def __init__(self) -> None:
        #: Whether the events describe the whole cache: from the first message on, or since the cache was empty.
        self.complete = False
        #: Whether a replay of all messages could tell more than is known.
        self.lost = True
        self.position = Position()
        #: Whether nothing was applied since the blocks were forgotten, and how often they were.
        self._is_empty = True
        self._era = 0

    def begin(self, *, complete: bool, lost: bool) -> None:
        """Record how much is known from the next message on."""
        self.complete, self.lost = complete, lost

    def advance(self, number: int, payload: bytes) -> Apply:
        """Record the next message, and return what to do with it."""
        self.position.set(number, payload)
        self._is_empty = False
        return Apply(payload, self._era)

    def end_era(self, *, restarted: bool = False) -> list[FeedAction]:
        """Forget what is known; return what follows."""
        self.complete, self.lost, self.position.last = False, True, None
        if self._is_empty and not restarted:
            return []
        self._is_empty = True
        self._era += 1
        return [Forget(restarted)]

    def emptied(self, era: int) -> None:
        """Record that an applied message reported an empty cache: from there on everything is known."""
        if era == self._era:
            self.complete, self.lost = True, False

    def spoiled(self, era: int) -> None:
        """Record that part of an applied message could not be read."""
        if era == self._era:
            self.complete = False
