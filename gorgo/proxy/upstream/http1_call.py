"""One HTTP/1.1 call on a connection of aiohttp's pool: a head and a body out, a status, headers and chunks back.

Owns what is between that pool and aiohttp's parser of answers: the bytes of a head, how a body is written, and when the
connection may carry the next call. Leaves connections to `transport`, and reading HTTP to aiohttp's C parser.

Theory of operation. aiohttp's session makes a dozen objects and a task for each request: for redirects, cookies,
encodings and bodies that are read as they are sent, of which a relay has none. That cost a small
request a fifth of its time, and its first byte a turn of the event loop. The connection's protocol is the same here,
and used in the order in which the session uses it: told what answer to expect, written to, read. The connection goes
back to the pool when the parser has seen the end of the answer; before that, it is closed.
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

#: What one answer may hold in memory before its replica is told to wait (twice this, by aiohttp's rule).
READ_BUFFER_BYTES = 64 * 1024
#: An answer's chunks are at most so large.
CHUNK_BYTES = 16 * 1024
#: Larger bodies are written in pieces of this; nearly all prompts fit into one.
WRITE_BYTES = 512 * 1024
#: Up to here head and body are joined: copying them costs less than a write of two parts.
_JOINED_BYTES = 64 * 1024

#: Everything by which a call or its answer can say that a peer or the network failed; `OSError` includes timeouts.
FAILURES = (aiohttp.ClientError, HttpProcessingError, OSError)
#: As which an answer can break off; what else happens while it is read is the reader's.
CUT_OFF = (aiohttp.ClientError, HttpProcessingError)


class HttpCall(httpx.AsyncByteStream):
    """A call whose answer has begun, and that answer's body."""

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
        """The body's bytes, never decoded. Raises one of `BROKEN_OFF` when they break off."""
        # The library's own iterator, not one around it: a layer costs each event of a stream a microsecond.
        return self._payload.iter_chunked(CHUNK_BYTES)

    async def aclose(self) -> None:
        self.release()

    def release(self) -> None:
        """Give the connection back if the answer was read to its end, else close it. Again, it does nothing."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if self._writer is not None and not self._writer.done():
            # Answered before the body was there: the rest of it must not go out as a request.
            self._writer.cancel()
            connection.close()
        else:
            connection.release()


async def send(connection: Connection, head: bytes, body: bytes, *, sent: Callable[[], None] | None = None) -> HttpCall:
    """Send a request, and return at its answer's headers. Raises one of `FAILURES`; the connection is closed then.

    `sent` is called when the request, or the first of it, is on its way.
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
        while True:
            message, payload = await protocol.read()
            if not 100 <= message.code < 200 or message.code == 101:
                _check_coding(message)
                return HttpCall(connection, message.code, message.raw_headers, payload, writer)
    except BaseException:
        if writer is not None:
            writer.cancel()
        connection.close()
        raise


def _check_coding(message: RawResponseMessage) -> None:
    """Codings of a hop end with it, and none but chunks is undone here: the rest would go on without its label."""
    codings = message.headers.getall(TRANSFER_ENCODING, ())
    if codings and (len(codings) > 1 or codings[0].strip().lower() != "chunked"):
        raise HttpProcessingError(message="a transfer coding that nobody asked for")


def encode_head(start: bytes, headers: Sequence[Header], *, close: bool = False) -> bytes:
    """A request's head. `start` is its first line, its end included; `close`: the connection is for this call alone.

    Raises `ValueError` for a control character, which could make two requests of it.
    """
    parts = [start]
    for name, value in headers:
        parts += (name, b": ", value, b"\r\n")
    if close:
        parts.append(b"Connection: close\r\n")
    parts.append(b"\r\n")
    head = b"".join(parts)
    # The listener lets no such thing in; a head that could be read as two requests must not depend on that.
    lines = start.count(b"\n") + len(headers) + close + 1
    if head.count(b"\n") != lines or head.count(b"\r") != lines or len(head.translate(None, CONTROLS)) != len(head):
        raise ValueError("a control character in a header")
    return head


def _send(protocol: ResponseHandler, head: bytes, body: bytes) -> asyncio.Task[None] | None:
    """Write it all, or what is more than the socket should be given at once in a task of its own.

    Head and body at once: a head that goes alone is a segment of its own, and over a new connection to a far replica
    the window then ends one segment short of a body of 100 kB: a round trip more.
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
    """A large body in pieces, so that the loop breathes while it is written."""
    # Whoever reads the answer is told by the connection itself that it is lost.
    with suppress(OSError):
        for start in range(0, len(body), WRITE_BYTES):
            await protocol._drain_helper()
            transport = protocol.transport
            if transport is None or transport.is_closing():
                return
            transport.write(bytes(body[start : start + WRITE_BYTES]))
