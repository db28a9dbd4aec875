"""The gaps between the tokens of one answer, for the p95 of its inter-token time.

Owns which chunks count: not comments, which keep a connection alive, and not the events of a stream's end, which carry
no token.
"""

from __future__ import annotations

from array import array
from math import ceil

from gorgo.core.stream import FirstTokenDetector, StreamState

#: Gaps recorded per answer; the first 4,096 stand for longer answers.
MAX_GAPS = 4096
#: Events of a dialect's end that carry no token, at most: a finish reason, usage, `[DONE]` and the like.
END_EVENTS = 4
#: A longer chunk at the end counts as tokens.
END_CHUNK_BYTES = 4 * 1024


class Gaps:
    """The gaps of one answer, s."""

    __slots__ = ("_recent", "_seconds", "last_s")

    def __init__(self, last_s: float = 0.0) -> None:
        #: When the last chunk came.
        self.last_s = last_s
        self._seconds = array("d")
        #: The last chunks that have a gap: that of gap n at n modulo `END_EVENTS`.
        self._recent = [b""] * END_EVENTS

    def __len__(self) -> int:
        return len(self._seconds)

    def add(self, chunk: bytes, now: float) -> None:
        """Count a chunk that is no comment."""
        seconds = self._seconds
        count = len(seconds)
        if count < MAX_GAPS:
            self._recent[count % END_EVENTS] = chunk
            seconds.append(now - self.last_s)
        self.last_s = now

    def drop_all(self) -> None:
        """Remove all gaps: pieces of one body are not tokens."""
        del self._seconds[:]

    def drop_end(self, route: str) -> None:
        """Remove the gaps of the last chunks without a token. Done once per stream, to keep `add` short."""
        count = len(self._seconds)
        if count == MAX_GAPS:
            return
        for place in range(count - 1, max(-1, count - 1 - END_EVENTS), -1):
            chunk = self._recent[place % END_EVENTS]
            if len(chunk) > END_CHUNK_BYTES:
                return
            if FirstTokenDetector(route).feed(chunk) is StreamState.CONTENT:
                return
            self._seconds.pop()

    def p95(self) -> float | None:
        """Return the 95th percentile; `None` without a gap."""
        seconds = self._seconds
        return sorted(seconds)[ceil(0.95 * len(seconds)) - 1] if seconds else None


def is_comment(chunk: bytes) -> bool:
    """Return whether a chunk of a stream is nothing but a comment."""
    return chunk[:1] == b":" and b"data:" not in chunk
