"""Writing a chunk straight to the client's socket, without hypercorn's work per chunk.

The only module that uses how hypercorn sends. Leaves heads, ends, errors and slow clients to hypercorn.

Theory of operation. For each chunk hypercorn makes three objects, drives an h11 state machine that a chunk does not
change (SEND_BODY stays SEND_BODY, and a chunked writer counts nothing), takes a lock, writes to the transport and waits
if that is full: a third of the cost of an event. The result is the chunk's size in hexadecimal, the chunk, and two line
ends, which are written here to the same transport. The order of bytes holds: hypercorn waits for nothing between two
writes, and during a body only its exchange writes, because h11 pauses before a pipelined request and answers no broken
one. The body's end goes through hypercorn, so that h11 finishes the response.

Conditions are checked in two steps. Once per response, `direct_write` checks that the layers down to the socket are
the expected ones: the methods that it replaces (no wrapper, no other protocol or server), a body that h11 chunks (no
HTTP/1.0), and no TLS, which has a buffer of its own. Once per chunk, `try_write` checks that the transport is open and
not behind. Otherwise the chunk goes through hypercorn, which waits for a slow client and notices a disconnect. So at
most `HIGH_WATER_BYTES` and one chunk wait for the client.
"""

from __future__ import annotations

from asyncio import WriteTransport
from collections.abc import Callable
from types import MethodType
from typing import Any

import h11
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.protocol.http_stream import HTTPStream

from gorgo.proxy.http.cors import CorsSend
from gorgo.proxy.http.listener import Connection

#: The default at which asyncio and uvloop pause writers; below it, hypercorn would not wait either.
HIGH_WATER_BYTES = 64 * 1024

#: Writes a chunk of a body; False if it was not written.
TryWrite = Callable[[bytes], bool]


def no_direct_write(chunk: bytes) -> bool:  # noqa: ARG001 - a `TryWrite`
    """Decline every chunk."""
    return False


def direct_write(send: object) -> TryWrite:
    """Return the `TryWrite` of a response whose head, without a length, was sent by the ASGI callable `send`."""
    if isinstance(send, CorsSend):
        send = send.wrapped  # It changes heads alone.
    try:
        transport = _transport(send)
    except AttributeError:
        # Another server, or another version of hypercorn.
        return no_direct_write
    return no_direct_write if transport is None else _try_write(transport)


def _transport(send: object) -> WriteTransport | None:
    """Return the client's transport, None unless each layer down to it is the expected one."""
    stream = _owner(send, HTTPStream.app_send)
    protocol = _owner(stream.send, H11Protocol.stream_send)
    client = _owner(protocol.send, Connection.protocol_send)
    connection = protocol.connection
    # h11 chunks a body without a length for HTTP/1.1 alone.
    if connection.our_state is not h11.SEND_BODY or connection.their_http_version != b"1.1" or protocol.ssl:
        return None
    transport: WriteTransport = client.writer.transport
    return transport


def _owner(call: Any, method: object) -> Any:
    """Return the object of a bound `method`. Raises `AttributeError` for any other callable, as a wrapper."""
    if type(call) is not MethodType or call.__func__ is not method:
        raise AttributeError
    return call.__self__


def _try_write(transport: WriteTransport) -> TryWrite:
    write, buffered_bytes, is_closing = transport.write, transport.get_write_buffer_size, transport.is_closing

    def try_write(chunk: bytes) -> bool:
        # An empty chunk would be the end of the body.
        if not chunk or buffered_bytes() >= HIGH_WATER_BYTES or is_closing():
            return False
        write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
        return True

    return try_write
