"""The last head of a connection, to recognise the next one that has the same lines but for the body's length.

Owns that comparison; each head that is not recognised is read in full. The lines have keys of clients, and a load
balancer's connection serves several of these, so the comparison takes equally long for each content.
"""

from __future__ import annotations

import re
from hmac import compare_digest

from gorgo.live.http.request_headers import RequestHeaders
from gorgo.live.listener.connection.head import Head

#: Digits of a length that is read without a second check; more would be a petabyte.
MAX_DIGITS = 15
_LENGTH = re.compile(rb"\r\ncontent-length: ([0-9]{1,15})\r\n", re.IGNORECASE)
_NAME = b"content-length"


class RepeatedHead:
    """A head that was accepted, with a length in digits."""

    __slots__ = ("_after", "_before", "_head", "_limit", "_place", "_size")

    def __init__(self, head: Head, *, before: bytes, after: bytes, place: int, limit: int) -> None:
        self._head = head
        self._before = before
        self._after = after
        self._size = len(before)
        #: Of the length in the list of headers.
        self._place = place
        self._limit = limit

    @classmethod
    def of(cls, text: bytes, head: Head, *, limit: int) -> RepeatedHead | None:
        """Return the head of the bytes `text` for comparison, if it is one that may be repeated.

        `limit`: bytes of a head, at most.
        """
        found = _LENGTH.search(text)
        if found is None or head.length is None:
            return None
        place = next(place for place, (name, _) in enumerate(head.headers) if name == _NAME)
        before, after = text[: found.start(1)], text[found.end(1) :]
        return cls(head, before=before, after=after, place=place, limit=limit)

    def again(self, text: bytes) -> Head | None:
        """Return the head of `text` if it repeats this one with any length, else `None`."""
        size = self._size
        end = text.find(b"\r\n", size)
        if end < 0:
            return None
        digits = text[size:end]
        if (
            not compare_digest(text[:size], self._before)
            or not compare_digest(text[end:], self._after)
            or not digits.isdigit()
            or len(digits) > MAX_DIGITS
            or len(text) > self._limit
        ):
            return None
        last = self._head
        headers = RequestHeaders(last.headers, last.headers.findings)
        headers[self._place] = (_NAME, digits)
        return last.repeated(headers, int(digits))
