"""One listening socket with hypercorn's connections on it.

Owns accepting, how many connections are open at once, and their end: when the client leaves, and when the proxy stops.
What is spoken on a connection is hypercorn's, as far as `wire` lets it through.

Why not `hypercorn.asyncio.serve`: in hypercorn 0.18 a connection whose client has closed it between two requests stays
open until the keep-alive time is over, because the task that watches that time is waited for. With 75 s and 100 new
connections a second, 7,500 descriptors are held for nobody. `Connection` ends that task with the connection. And what
hypercorn speaks is not strict; `Spoken` puts in what is.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from hypercorn.asyncio.task_group import TaskGroup
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from hypercorn.events import Event, RawData, Updated
from hypercorn.protocol import ProtocolWrapper
from hypercorn.protocol.h11 import H2ProtocolAssumedError, H11Protocol
from hypercorn.typing import ConnectionState
from hypercorn.utils import parse_socket_addr, wrap_app

from gorgo.proxy.http2 import StrictH2Protocol
from gorgo.proxy.wire import HeadLimits, StrictProtocol

#: `struct linger`: closed at once, which the kernel says by a reset.
_NO_LINGERING = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True)
class Door:
    """What a listener asks of those who connect now.

    `connections` may be open at once; one more is closed unanswered, because an answer would need what is short.
    """

    head: HeadLimits
    connections: int


class Spoken(ProtocolWrapper):
    """The protocol of one connection: the strict ones. `made` are hypercorn's own arguments."""

    def __init__(self, limits: HeadLimits, *made: Any, alpn_protocol: str | None) -> None:
        super().__init__(*made)
        self._http2 = partial(StrictH2Protocol, limits, *made)
        assert isinstance(self.protocol, H11Protocol)
        self.protocol = self._http2() if alpn_protocol == "h2" else StrictProtocol(self.protocol, limits)

    async def handle(self, event: Event) -> None:
        try:
            await self.protocol.handle(event)
        except H2ProtocolAssumedError as begun:
            self.protocol = self._http2()
            await self.protocol.initiate()
            await self.protocol.handle(RawData(begun.data))


class Connection(TCPServer):
    """hypercorn's connection, over when its client is gone."""

    _over = False
    _reset = False
    head_limits = HeadLimits(64 * 1024, 128, 10.0)

    async def run(self) -> None:
        """As hypercorn's, which has no way to be given a protocol."""
        socket, tls = self.writer.get_extra_info("socket"), self.writer.get_extra_info("ssl_object")
        try:
            client = parse_socket_addr(socket.family, socket.getpeername())
            server = parse_socket_addr(socket.family, socket.getsockname())
            async with TaskGroup(self.loop) as tasks:
                self._task_group = tasks
                state = ConnectionState(self.state)
                made = (self.app, self.config, self.context, tasks, state, tls is not None, client, server)
                alpn_protocol = None if tls is None else tls.selected_alpn_protocol()
                self.protocol = Spoken(self.head_limits, *made, self.protocol_send, alpn_protocol=alpn_protocol)
                await self.protocol.initiate()
                await self.idle_task.restart(tasks, self._idle_timeout)
                await self._read_data()
        except OSError:
            pass  # It left before anything was said.
        finally:
            await self._close()

    async def protocol_send(self, event: Event) -> None:
        # An answer that ends after its client left must not start to wait for the next request.
        if not (self._over and isinstance(event, Updated)):
            await super().protocol_send(event)

    def reset(self) -> None:
        """End with an error for the client; what it has not been sent is dropped."""
        client = self.writer.get_extra_info("socket")
        with suppress(OSError):  # it has left
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGERING)
        self._reset = True
        self.writer.transport.abort()

    async def _close(self) -> None:
        if self._reset:  # uvloop would still send an orderly end before
            await self.idle_task.stop()
        else:
            await super()._close()

    async def _read_data(self) -> None:
        await super()._read_data()
        self._over = True
        await self.idle_task.stop()


async def serve_app(
    app: Any,
    config: Config,
    listener: socket.socket,
    closing: asyncio.Event,
    *,
    door: Callable[[], Door],
    tls: ssl.SSLContext | None = None,
) -> None:
    """Answer what arrives at `listener` until `closing` is set; then end idle connections at once and the others
    within `config.graceful_timeout`. The listener is closed on return.

    `door` is asked for each connection. With `tls` they all speak it, and have as long to agree on it as the first
    door grants a request's head.
    """
    loop = asyncio.get_running_loop()
    context = WorkerContext(None)
    wrapped = wrap_app(app, config.wsgi_max_body_size, "asgi")
    open_now: dict[asyncio.Task[Any], asyncio.StreamWriter] = {}

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        asked = door()
        if len(open_now) >= asked.connections:
            writer.transport.abort()
            return
        open_now[task] = writer
        task.add_done_callback(open_now.pop)
        # For an app whose client does not read: an orderly end would wait for it.
        shared = {"abort": writer.transport.abort}
        connection = Connection(wrapped, loop, config, context, shared, reader, writer)
        shared["reset"] = connection.reset
        connection.head_limits = asked.head
        with suppress(OSError):  # the client's end of TLS can fail while ours is closed
            await connection

    timeout_s = None if tls is None else door().head.timeout_s
    server = await asyncio.start_server(
        connected, sock=listener, backlog=config.backlog, ssl=tls, ssl_handshake_timeout=timeout_s
    )
    try:
        await closing.wait()
    finally:
        await context.terminated.set()
        server.close()
        await _end(open_now, config.graceful_timeout)


async def _end(open_now: Mapping[asyncio.Task[Any], asyncio.StreamWriter], limit_s: float) -> None:
    """Wait, then cancel, then abort: an orderly end waits for the client to read what is left, and some never do."""
    await _settle(open_now, limit_s)
    for task in tuple(open_now):
        task.cancel()
    await _settle(open_now, limit_s)
    for writer in tuple(open_now.values()):
        writer.transport.abort()
    await _settle(open_now, limit_s)


async def _settle(open_now: Mapping[asyncio.Task[Any], asyncio.StreamWriter], limit_s: float) -> None:
    if open_now:
        await asyncio.wait(tuple(open_now), timeout=limit_s)
