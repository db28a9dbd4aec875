"""A chunked body: decoded strictly, its chunks neither too many nor too small.

httptools does not show the bytes between two chunks, where readers differ: blanks behind the size, lone CRs in an
extension, sizes of more than 64 bits, a bare LF. So they are read here. Trailers are checked as a head is, and dropped.
"""

from __future__ import annotations

import re
from enum import Enum, auto

from gorgo.live.listener.connection.head import LINES, check_lines, check_size
from gorgo.live.listener.connection.refusal import Refused
from gorgo.live.listener.heads import HeadLimits

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


class _Next(Enum):
    LINE = auto()
    DATA = auto()
    DATA_END = auto()
    TRAILERS = auto()


class ChunkedBody:
    """The decoder of one body."""

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
