r"""The requests of one connection, from bytes in any pieces. No sockets, no time.

Owns the reader (`RequestReader`), the decoder of chunked bodies (`ChunkedBody`), and the head that the next one may
repeat (`RepeatedHead`). Leaves the check of a head to the code that parses it.

A request is read only after the one before it was answered. Bytes behind it wait: the end of a connection comes behind
them, and an unread connection does not show that its client disconnected. The connection pauses reading at the size of
a head. Behind the last request of a connection nothing is read as another.

A chunked body is decoded strictly, its chunks neither too many nor too small. httptools does not show the bytes between
two chunks, where readers differ: blanks behind the size, lone CRs in an extension, sizes of more than 64 bits, a bare
LF. So they are read here. Trailers are checked as a head is, and dropped.

Example
-------
>>> reader = RequestReader(HeadLimits(1000, 10.0))
>>> reader.receive(b"POST /a HTTP/1.1\r\nhost: g\r\ncontent-length: 3\r\n\r\nab")
>>> reader.next_head().target, reader.read_body(), reader.complete
(b'/a', b'ab', False)
>>> reader.receive(b"cGET /")
>>> reader.read_body(), reader.complete, reader.buffered_bytes
(b'c', True, 5)
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum, auto
from hmac import compare_digest
from typing import NoReturn, ParamSpec, TypeVar

from gorgo.live.http.headers import RequestHeaders
from gorgo.live.listener.connection.head import LINES, Head, Refused, check_lines, check_size, read_head
from gorgo.live.listener.heads import HeadLimits

# The last head of a connection, to recognise the next one that has the same lines but for the body's length.
#
# Owns that comparison; each head that is not recognised is read in full. The lines have keys of clients, and a load
# balancer's connection serves several of these, so the comparison takes equally long for each content.


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


P = ParamSpec("P")
R = TypeVar("R")
#: Chunks of one body that may be of any size, and the least mean size beyond: each takes some microseconds, and a read
#: could have ten thousand of one byte.
SMALL_CHUNKS, MEAN_CHUNK_BYTES = 512, 64
#: The line before a chunk, with its extension; extensions are not used by clients.
MAX_LINE_BYTES = 1024
_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})(?:;[^\x00-\x08\x0a-\x1f\x7f]*+)?\r\n")
#: A line whose end is yet to come.
_PARTIAL_LINE = re.compile(rb"(?:[0-9A-Fa-f]{1,16}(?:;[^\x00-\x08\x0a-\x1f\x7f]*+)?\r?)?")
_TRAILERS = re.compile(LINES + rb"\r\n")
#: Trailers that say how long a body is; RFC 9110 forbids them, and readers differ on what they mean.
_FRAMING = re.compile(rb"(?:\A|\n)(?:content-length|transfer-encoding):", re.IGNORECASE)
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


class _Next(Enum):
    LINE = auto()
    DATA = auto()
    DATA_END = auto()
    TRAILERS = auto()


class ChunkedBody:
    """The decoder of one chunked body."""

    __slots__ = ("_bytes", "_chunks", "_last_line", "_left", "_limits", "_next")

    def __init__(self, limits: HeadLimits) -> None:
        self._limits = limits
        self._next = _Next.LINE
        #: Bytes of the current chunk that are yet to come.
        self._left = 0
        self._chunks = self._bytes = 0
        self._last_line = b""

    def decode(self, data: bytes, at: int) -> tuple[bytes, int, bool]:
        """Return the body's bytes in `data` from `at` on, the position behind them, and whether the body has ended.

        Raises `Refused`. Bytes from the returned position on are needed again, with those that follow.
        """
        parts: list[bytes] = []
        while True:
            match self._next:
                case _Next.DATA:
                    part = data[at : at + self._left]
                    parts.append(part)
                    at += len(part)
                    self._left -= len(part)
                    if self._left:
                        break
                    self._next = _Next.DATA_END
                case _Next.DATA_END:
                    end = data[at : at + 2]
                    if end != b"\r\n":
                        if end not in (b"", b"\r"):
                            raise Refused("a chunk longer than its size")
                        break
                    at += 2
                    self._next = _Next.LINE
                case _Next.LINE:
                    line = _LINE.match(data, at)
                    if line is None:
                        self._check_partial_line(data, at)
                        break
                    at = line.end()
                    self._begin_chunk(line)
                case _Next.TRAILERS:
                    end_at = self._end_of_trailers(data, at)
                    if end_at is None:
                        break
                    return b"".join(parts), end_at, True
        return parts[0] if len(parts) == 1 else b"".join(parts), at, False

    def _begin_chunk(self, line: re.Match[bytes]) -> None:
        if line.end() - line.start() > MAX_LINE_BYTES:
            raise Refused("a long extension of a chunk")
        size = int(line[1], 16)
        if not size:
            self._last_line = line[0]
            self._next = _Next.TRAILERS
            return
        self._chunks += 1
        self._bytes += size
        if self._chunks > SMALL_CHUNKS and self._bytes < self._chunks * MEAN_CHUNK_BYTES:
            raise Refused("many small chunks")
        self._left = size
        self._next = _Next.DATA

    @staticmethod
    def _check_partial_line(data: bytes, at: int) -> None:
        if len(data) - at > MAX_LINE_BYTES or _PARTIAL_LINE.fullmatch(data, at) is None:
            raise Refused("an ambiguous chunk")

    def _end_of_trailers(self, data: bytes, at: int) -> int | None:
        """Return the position behind the trailers; None if they are incomplete."""
        if data.startswith(b"\r\n", at):
            return at + 2
        end = data.find(b"\r\n\r\n", at)
        if end < 0:
            if _BARE_LF.search(data, at):
                raise Refused("a line end other than CR LF")
            if len(self._last_line) + len(data) - at > self._limits.size_bytes:
                raise Refused("head or trailers too large", 431)
            return None
        text = data[at : end + 4]
        check_lines(self._last_line + text)
        check_size(self._last_line + text, self._limits)
        if _TRAILERS.fullmatch(text) is None or _FRAMING.search(text) is not None:
            raise Refused("an ambiguous trailer")
        return end + 4
