"""The short way of a chunk to the client's socket, past the work that hypercorn would do for each.

Owns what GORGO knows of how hypercorn sends, and is the only module that does. Leaves heads, ends, errors, slow clients
and everything else to hypercorn, which never learns that a chunk went by.

Theory of operation. For each chunk hypercorn makes three objects, asks h11 to move a state machine that a chunk does
not move (SEND_BODY stays SEND_BODY, and a chunked writer counts nothing), takes a lock, writes to the transport and
waits if that is full: a third of what an event of a stream costs the proxy. What comes of it is the chunk's size in
hexadecimal, the chunk, and two line ends, which is written here straight to the same transport. The order of bytes
holds, because hypercorn waits for nothing between a write and the next, and while a body is under way nobody but its
exchange writes: h11 pauses before a pipelined request, and answers no broken one in the middle of a body. The body's
end goes through hypercorn again, so that h11 finishes the response and the connection serves the next request.

When a chunk may take it is asked in two steps. Once per answer, `shortcut` looks whether what is between us and the
socket is what this was written for: the very methods that it replaces (no wrapper, no other protocol or server), a body
that h11 chunks (no client of HTTP/1.0), and no TLS, where the transport's buffer is not the only one. Once per chunk,
`push` looks whether the transport is open and not behind. Whenever the answer is no, the chunk takes hypercorn's way,
which waits for a slow client and notices one that left. So at most `HIGH_WATER_BYTES` and one chunk are ever waiting.
"""

from __future__ import annotations

from asyncio import WriteTransport
from collections.abc import Callable
from types import MethodType
from typing import Any

import h11
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.protocol.http_stream import HTTPStream

from gorgo.proxy.http.listener import Connection

#: Where asyncio and uvloop begin to hold writers back by default; up to there, hypercorn would not wait either.
HIGH_WATER_BYTES = 64 * 1024

#: Takes a chunk of a body: True if it is on its way, False if nothing was done with it.
TryWrite = Callable[[bytes], bool]


def no_direct_write(chunk: bytes) -> bool:  # noqa: ARG001 - a `TryWrite`
    """The `TryWrite` of an answer that has no shortcut."""
    return False


def direct_write(send: object) -> TryWrite:
    """For an answer whose head, without a content length, has just gone out through the ASGI callable `send`."""
    try:
        transport = _transport(send)
    except AttributeError:
        # Not hypercorn, or one that is built otherwise: its own way is always right, only slower.
        return no_direct_write
    return no_direct_write if transport is None else _try_write(transport)


def _transport(send: object) -> WriteTransport | None:
    """The client's, if whatever lies between is known."""
    stream = _owner(send, HTTPStream.app_send)
    protocol = _owner(stream.send, H11Protocol.stream_send)
    client = _owner(protocol.send, Connection.protocol_send)
    connection = protocol.connection
    # With a body due and no length declared, h11 chunks it for HTTP/1.1, and for nobody else.
    if connection.our_state is not h11.SEND_BODY or connection.their_http_version != b"1.1" or protocol.ssl:
        return None
    transport: WriteTransport = client.writer.transport
    return transport


def _owner(call: Any, method: object) -> Any:
    """The object whose `method` this is. Raises `AttributeError` for any other callable, a wrapper for instance."""
    if type(call) is not MethodType or call.__func__ is not method:
        raise AttributeError
    return call.__self__


def _try_write(transport: WriteTransport) -> TryWrite:
    write, waiting, closing = transport.write, transport.get_write_buffer_size, transport.is_closing

    def push(chunk: bytes) -> bool:
        # An empty chunk would be the end of the body.
        if not chunk or waiting() >= HIGH_WATER_BYTES or closing():
            return False
        write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
        return True

    return push
