"""aiohttp's protocol of one connection, with bounded work in one turn of the event loop.

Owns the pace of parsing. An ordinary read is parsed at once.

Theory of operation. aiohttp parses all that was read in one step, and each chunk of the transfer coding takes
microseconds, also one of a single byte: a read of 256 KiB can have forty thousand. Such a read has many line ends. It
is parsed in slices, one per turn, and reading pauses until the last of them.
"""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
from aiohttp.client_proto import ResponseHandler

#: Largest part of a dense read that is parsed in one turn: a thousand chunks of one byte, some milliseconds.
SLICE_BYTES = 4 * 1024
#: A read is dense from one line end per so many bytes. Events of a token have one per forty or more.
DENSE = 16


class PacedHandler(ResponseHandler):
    """A connection's protocol. A broken framing also fails the body that is being read.

    aiohttp 3.14 closes the connection and leaves the reader to its timeout.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        #: Read, and not parsed yet.
        self._unparsed = b""
        #: The end of the connection, until all is parsed.
        self._end: tuple[BaseException | None] | None = None

    @property
    def should_close(self) -> bool:
        return bool(self._unparsed) or super().should_close

    def data_received(self, data: bytes) -> None:
        if self._unparsed:
            self._unparsed += data
        elif len(data) <= SLICE_BYTES or data.count(b"\n") * DENSE <= len(data):
            super().data_received(data)
        else:
            self._unparsed = data
            self._pause_reading_for_buffer()
            self._loop.call_soon(self._parse_slice)

    def _parse_slice(self) -> None:
        piece, self._unparsed = self._unparsed[:SLICE_BYTES], self._unparsed[SLICE_BYTES:]
        if piece:
            super().data_received(piece)
        if self._unparsed:
            self._loop.call_soon(self._parse_slice)
        elif self._end is not None:
            super().connection_lost(*self._end)
        else:
            self._resume_reading_for_buffer()

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._unparsed and self.transport is not None:
            self._end = (exc,)
            return
        self._unparsed = b""  # the connection was closed on this side
        super().connection_lost(exc)

    def set_exception(self, exc: Any, *cause: Any) -> None:
        super().set_exception(exc, *cause)
        payload = self._payload
        if payload is not None and not payload.is_eof() and payload.exception() is None:
            payload.set_exception(aiohttp.ClientPayloadError("the body's framing is broken"))
