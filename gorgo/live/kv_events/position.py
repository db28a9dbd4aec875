"""Where a feed is among its publisher's messages."""

from __future__ import annotations

from hashlib import blake2b

#: Longest message that is retained for a comparison: those of 1,000 replicas take 16 MB.
COMPARED_BYTES = 16 * 1024


class Position:
    """The last message applied, and the highest live number of this process.

    Example
    -------
    >>> position = Position()
    >>> position.set(7, b"payload")
    >>> position.is_next(8), position.has_content(b"other")
    (True, False)
    """

    def __init__(self) -> None:
        #: `None`: any message may be the next; -1: the first one is.
        self.last: int | None = None
        self.live: int | None = None
        self._content = b""

    def set(self, number: int, payload: bytes) -> None:
        """Record the last message applied."""
        self.last, self._content = number, _content(payload)

    def is_next(self, number: int) -> bool:
        return self.last is not None and number == self.last + 1

    def has_content(self, payload: bytes) -> bool:
        """Return whether the last message had this content."""
        return _content(payload) == self._content

    def goes_back(self, number: int) -> bool:
        """Return whether a live message of this number is of another process."""
        return self.live is not None and number <= self.live


def _content(payload: bytes) -> bytes:
    """Return what a message is compared by: itself, or a digest of a long one."""
    return payload if len(payload) <= COMPARED_BYTES else blake2b(payload).digest()
