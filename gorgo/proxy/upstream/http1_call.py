"""One HTTP/1.1 call on a pooled connection: a head and a body out, a status, headers and chunks back.

Owns the bytes of a head, how a body is written, and when the connection may carry the next call. Leaves connections to
`pool`, and parsing responses to aiohttp's C parser.

Theory of operation. aiohttp's session makes a dozen objects and a task for each request, for redirects, cookies,
encodings and streamed bodies, none of which a relay has. They cost a small request a fifth of its time, and its first
byte a turn of the event loop. Here the connection's protocol is used in the session's order: set the response's
parameters, write, read. At the end of the response the connection returns to the pool; before it, it is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress

import aiohttp
import httpx
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from aiohttp.hdrs import TRANSFER_ENCODING
from aiohttp.http import HttpProcessingError, RawResponseMessage
from aiohttp.streams import StreamReader

from gorgo.proxy.http.headers import CONTROLS, Header

#: Unread bytes of a response before reading from its replica pauses (at twice this, by aiohttp's rule).
READ_BUFFER_BYTES = 64 * 1024
#: Largest chunk of a response.
CHUNK_BYTES = 16 * 1024
#: Larger bodies are written in pieces of this; nearly all prompts fit into one.
WRITE_BYTES = 512 * 1024
#: Up to here head and body are joined: copying them costs less than a write of two parts.
_JOINED_BYTES = 64 * 1024

#: Interim answers (1xx) before the final one, at most. Engines send one or none; of a flood each takes a
#: turn of the event loop.
MAX_INTERIM = 8

#: Failures of a peer or the network during a call; `OSError` includes timeouts.
FAILURES = (aiohttp.ClientError, HttpProcessingError, OSError)
#: Failures of a body that is being read; anything else that is raised meanwhile is the reader's.
CUT_OFF = (aiohttp.ClientError, HttpProcessingError)


class HttpCall(httpx.AsyncByteStream):
    """A call with its response's head, and the body of that response."""

    __slots__ = ("_connection", "_payload", "_writer", "headers", "status")

    def __init__(
        self,
        connection: Connection,
        status: int,
        headers: Sequence[Header],
        payload: StreamReader,
        writer: asyncio.Task[None] | None,
    ) -> None:
        self._connection: Connection | None = connection
        self._payload = payload
        self._writer = writer
        self.status = status
        self.headers = headers
        payload.on_eof(self.release)

    def __aiter__(self) -> AsyncIterator[bytes]:
        """Iterate over the body's bytes, never decoded. Raises one of `CUT_OFF`."""
        # aiohttp's own iterator: a layer around it costs each event of a stream a microsecond.
        return self._payload.iter_chunked(CHUNK_BYTES)

    async def aclose(self) -> None:
        self.release()

    def release(self) -> None:
        """Return the connection to the pool if the response was read to its end, else close it. Idempotent."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if self._writer is not None and not self._writer.done():
            # The response came before the whole body was sent: its rest must not be read as a request.
            self._writer.cancel()
            connection.close()
        else:
            connection.release()


async def send(connection: Connection, head: bytes, body: bytes, *, sent: Callable[[], None] | None = None) -> HttpCall:
    """Send a request; return at the head of its response. Raises one of `FAILURES` and closes the connection.

    `sent` is called once the first bytes are written.
    """
    writer: asyncio.Task[None] | None = None
    try:
        protocol = connection.protocol
        if protocol is None:
            raise aiohttp.ClientOSError("the connection is closed")
        protocol.set_response_params(read_until_eof=True, auto_decompress=False, read_bufsize=READ_BUFFER_BYTES)
        writer = _send(protocol, head, body)
        if sent is not None:
            sent()
        for _ in range(MAX_INTERIM + 1):
            message, payload = await protocol.read()
            if not 100 <= message.code < 200 or message.code == 101:
                _check_coding(message)
                return HttpCall(connection, message.code, message.raw_headers, payload, writer)
        raise HttpProcessingError(message=f"more than {MAX_INTERIM} interim answers")
    except BaseException:
        if writer is not None:
            writer.cancel()
        connection.close()
        raise


def _check_coding(message: RawResponseMessage) -> None:
    """Raise for any transfer coding but chunked: it would pass to the client without its label."""
    codings = message.headers.getall(TRANSFER_ENCODING, ())
    if codings and (len(codings) > 1 or codings[0].strip().lower() != "chunked"):
        raise HttpProcessingError(message="unexpected transfer coding")


def encode_head(start: bytes, headers: Sequence[Header], *, close: bool = False) -> bytes:
    """Return a request's head. `start` is its first line, its end included; `close` ends the connection after it.

    Raises `ValueError` for a control character, which could make two requests of one.
    """
    parts = [start]
    for name, value in headers:
        parts += (name, b": ", value, b"\r\n")
    if close:
        parts.append(b"Connection: close\r\n")
    parts.append(b"\r\n")
    head = b"".join(parts)
    # The listener refuses these too. A second check, since a head that reads as two requests is an attack.
    lines = start.count(b"\n") + len(headers) + close + 1
    if head.count(b"\n") != lines or head.count(b"\r") != lines or len(head.translate(None, CONTROLS)) != len(head):
        raise ValueError("a control character in a header")
    return head


def _send(protocol: ResponseHandler, head: bytes, body: bytes) -> asyncio.Task[None] | None:
    """Write a request; return the task that writes the rest of a large body.

    Head and body go in one write: a head alone is a segment of its own, and on a new connection to a far replica the
    window then ends one segment short of a body of 100 kB, which costs a round trip.
    """
    transport = protocol.transport
    if transport is None or transport.is_closing():
        raise aiohttp.ClientOSError("the connection is closed")
    if len(body) <= _JOINED_BYTES:
        transport.write(head + body)
        return None
    if len(body) <= WRITE_BYTES:
        transport.writelines((head, body))
        return None
    pieces = memoryview(body)
    transport.writelines((head, pieces[:WRITE_BYTES]))
    return asyncio.create_task(_send_pieces(protocol, pieces[WRITE_BYTES:]))


async def _send_pieces(protocol: ResponseHandler, body: memoryview) -> None:
    """Write a large body in pieces, so that other tasks run in between."""
    # A lost connection also fails the reader of the response.
    with suppress(OSError):
        for start in range(0, len(body), WRITE_BYTES):
            await protocol._drain_helper()
            transport = protocol.transport
            if transport is None or transport.is_closing():
                return
            transport.write(bytes(body[start : start + WRITE_BYTES]))
