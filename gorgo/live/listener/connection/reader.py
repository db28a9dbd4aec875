"""The requests of one connection, from bytes in any pieces. No sockets, no time.

A request is read only after the one before it was answered. Bytes behind it wait: the end of a connection comes behind
them, and an unread connection does not show that its client disconnected. The connection pauses reading at the size of
a head. Behind the last request of a connection nothing is read as another.

Example
-------
>>> reader = RequestReader(HeadLimits(1000, 10.0))
>>> reader.receive(b"POST /a HTTP/1.1\\r\\nhost: g\\r\\ncontent-length: 3\\r\\n\\r\\nab")
>>> reader.next_head().target, reader.read_body(), reader.complete
(b'/a', b'ab', False)
>>> reader.receive(b"cGET /")
>>> reader.read_body(), reader.complete, reader.buffered_bytes
(b'c', True, 5)
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NoReturn, ParamSpec, TypeVar

from gorgo.live.listener.connection.chunks import ChunkedBody
from gorgo.live.listener.connection.head import Head, read_head
from gorgo.live.listener.connection.refusal import Refused
from gorgo.live.listener.connection.repeated_head import RepeatedHead
from gorgo.live.listener.heads import HeadLimits

P = ParamSpec("P")
R = TypeVar("R")
_BARE_LF = re.compile(rb"(?<!\r)\n")


class RequestReader:
    """Reads requests one after the other.

    `next_head` begins a request, `read_body` continues it until it is `complete`, and `start_next` permits the next.
    After `Refused` or `stop` every further byte is dropped.
    """

    __slots__ = (
        *("_at", "_chunks", "_data", "_last_head", "_left", "_limits", "_persistent", "_scanned", "_stopped"),
        "complete",
    )

    def __init__(self, limits: HeadLimits) -> None:
        self._limits = limits
        #: Received bytes; those before `_at` were read, and those before `_scanned` have no end of a head.
        self._data = b""
        self._at = self._scanned = 0
        self._stopped = False
        #: Bytes of the body that are yet to come, unless it is chunked.
        self._left = 0
        self._chunks: ChunkedBody | None = None
        self._persistent = True
        self._last_head: RepeatedHead | None = None
        #: Whether the current request was read to its end.
        self.complete = False

    @property
    def buffered_bytes(self) -> int:
        """Received bytes that are not read: of an incomplete head, or behind the current request."""
        return len(self._data) - self._at

    def receive(self, data: bytes) -> None:
        if self._stopped:
            return
        if self._at == len(self._data):
            self._data, self._scanned = data, 0
        else:
            self._data, self._scanned = self._data[self._at :] + data, max(0, self._scanned - self._at)
        self._at = 0

    def next_head(self) -> Head | None:
        """Return the next request's head, None if it is incomplete. Raises `Refused`."""
        start = self._at
        end = self._data.find(b"\r\n\r\n", max(start, self._scanned - 3)) + 4
        if end < 4:
            self._check_partial_head()
            return None
        head = self._read_head(self._data[start:end])
        self._at = end
        self._persistent = head.persistent
        if head.length is None:
            self._chunks = ChunkedBody(self._limits)
        else:
            self._left, self._chunks = head.length, None
            if not head.length:
                self._complete()
        return head

    def _read_head(self, text: bytes) -> Head:
        last = self._last_head
        head = None if last is None else last.again(text)
        if head is None:
            head = self._checked(read_head, text, self._limits)
            self._last_head = RepeatedHead.of(text, head, limit=self._limits.size_bytes)
        return head

    def read_body(self) -> bytes:
        """Return the received bytes of the body, and set `complete` behind the last. Raises `Refused`."""
        if self.complete:
            return b""
        data, at = self._data, self._at
        if self._chunks is None:
            part = data if not at and len(data) <= self._left else data[at : at + self._left]
            self._at += len(part)
            self._left -= len(part)
            ended = not self._left
        else:
            part, self._at, ended = self._checked(self._chunks.decode, data, at)
        if ended:
            self._complete()
        return part

    def start_next(self) -> None:
        """Permit the next request; the current one is complete and answered."""
        self.complete = False
        self._scanned = self._at

    def stop(self) -> None:
        """Drop what was received and all that follows."""
        self._stopped = True
        self._last_head = None
        self._data = b""
        self._at = self._scanned = 0

    def _complete(self) -> None:
        self.complete = True
        if not self._persistent:
            self.stop()

    def _check_partial_head(self) -> None:
        """Refuse an incomplete head as soon as it shows that it is none, or too large."""
        data, size = self._data, len(self._data) - self._at
        if not size:
            return
        if data[self._at] <= 0x20:
            self._refuse("no request line")  # as the first byte of a TLS handshake
        if _BARE_LF.search(data, max(self._at, self._scanned)):
            self._refuse("a line end other than CR LF")
        if size > self._limits.size_bytes:
            self._refuse("head or trailers too large", 431)
        self._scanned = len(data)

    def _refuse(self, why: str, status: int = 400) -> NoReturn:
        self.stop()
        raise Refused(why, status)

    def _checked(self, read: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call `read`; stop at a refusal."""
        try:
            return read(*args, **kwargs)
        except Refused:
            self.stop()
            raise
