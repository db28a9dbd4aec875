"""One listening socket with hypercorn's connections on it.

Owns accepting, how many connections are open at once, and their end: when the client leaves, and when the proxy stops.
HTTP/1.1 on a connection is hypercorn's, as far as `wire` lets it through; no other protocol is spoken.

Why not `hypercorn.asyncio.serve`: in hypercorn 0.18 a connection whose client has closed it between two requests stays
open until the keep-alive time is over, because the task that watches that time is waited for. With 75 s and 100 new
connections a second, 7,500 descriptors are held for nobody. `Connection` ends that task with the connection. It also
speaks `StrictProtocol` instead of hypercorn's own choice, which is lenient and would switch to HTTP/2.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hypercorn.asyncio.task_group import TaskGroup
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from hypercorn.events import Event, Updated
from hypercorn.typing import ConnectionState
from hypercorn.utils import parse_socket_addr, wrap_app

from gorgo.proxy.http.http1 import HeadLimits, StrictProtocol
from gorgo.proxy.logs import log

#: `struct linger`: closed at once, which the kernel says by a reset.
_NO_LINGERING = struct.pack("ii", 1, 0)
#: A client that takes nothing for so long of what it was answered is gone: as long as idle proxies on its way may be.
LINGER_S = 30.0
#: As asyncio's own servers wait.
_ACCEPT_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class AcceptLimits:
    """What a listener asks of those who connect now.

    `connections` may be open at once; one more is closed unanswered, because an answer would need what is short.
    """

    head: HeadLimits
    connections: int


class _LingerTimeout:
    """With a client that takes what is left of its answer. An orderly end would wait for one that does not for ever."""

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.WriteTransport) -> None:
        self._loop = loop
        self._transport = transport
        self._left = transport.get_write_buffer_size()
        self._timer = loop.call_later(LINGER_S, self._check)

    def expired(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        before, self._left = self._left, self._transport.get_write_buffer_size()
        if self._left >= before:
            self._transport.abort()
        else:
            self._timer = self._loop.call_later(LINGER_S, self._check)


class Connection(TCPServer):
    """hypercorn's connection, over when its client is gone."""

    _over = False
    _reset = False
    head_limits = HeadLimits(64 * 1024, 10.0)

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
                # hypercorn's wrapper would choose among protocols; here there is one.
                self.protocol = StrictProtocol(self.head_limits, *made, self.protocol_send)  # type: ignore[assignment]
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
            return
        patience = _LingerTimeout(self.loop, self.writer.transport)
        try:
            await super()._close()
        finally:
            patience.expired()

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
    door: Callable[[], AcceptLimits],
    tls: ssl.SSLContext | None = None,
) -> None:
    """Answer what arrives at `listener` until `closing` is set; then end idle connections at once and the others
    within `config.graceful_timeout`. The listener is closed on return.

    `door` is asked for each connection. With `tls` they all speak it, and have as long to agree on it as for a
    request's head; meanwhile they count as open.
    """
    open_now = _Connections(app, config, door)
    close: Callable[[], object]
    if tls is None:
        server = await asyncio.start_server(open_now.accept_socket, sock=listener, backlog=config.backlog)
        close = server.close
    else:
        close = asyncio.create_task(open_now.accept(listener, tls)).cancel
    try:
        await closing.wait()
    finally:
        await open_now.context.terminated.set()
        close()
        listener.close()
        await open_now.end(config.graceful_timeout)


class _Connections:
    """Those that are open at one listener, each with its task."""

    def __init__(self, app: Any, config: Config, door: Callable[[], AcceptLimits]) -> None:
        self._app = wrap_app(app, config.wsgi_max_body_size, "asgi")
        self._config = config
        self._door = door
        #: Without a writer while it agrees on TLS.
        self._open: dict[asyncio.Task[Any], asyncio.StreamWriter | None] = {}
        self.context = WorkerContext(None)

    async def accept_socket(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One without TLS, in a task of its own."""
        head = self._admitted()
        if head is None:
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        self._keep(task)
        await self._serve(reader, writer, head)

    async def accept(self, listener: socket.socket, tls: ssl.SSLContext) -> None:
        """All of those with TLS. asyncio's own server would show only those that agreed, and count no others."""
        listener.setblocking(False)
        while True:
            client = await _accepted(listener)
            head = self._admitted()
            if head is None:
                client.close()
            else:
                self._keep(asyncio.create_task(self._agree(client, tls, head)))
            await asyncio.sleep(0)  # the others' turn, however many are at the door

    async def end(self, limit_s: float) -> None:
        """Wait, then cancel, then abort: an orderly end waits for a client to read what is left, and some never do."""
        await self._settle(limit_s)
        for task in tuple(self._open):
            task.cancel()
        await self._settle(limit_s)
        for writer in tuple(self._open.values()):
            if writer is not None:
                writer.transport.abort()
        await self._settle(limit_s)

    def _admitted(self) -> HeadLimits | None:
        """What is asked of one more; `None` if that is too many."""
        asked = self._door()
        return asked.head if len(self._open) < asked.connections else None

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._open[task] = None
        task.add_done_callback(self._open.pop)

    async def _agree(self, client: socket.socket, tls: ssl.SSLContext, head: HeadLimits) -> None:
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        with suppress(OSError):  # it left, is too slow, or speaks something else
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol, client, ssl=tls, ssl_handshake_timeout=head.timeout_s
            )
            await self._serve(reader, asyncio.StreamWriter(transport, protocol, reader, loop), head)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: HeadLimits) -> None:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        self._open[task] = writer
        # For an app whose client does not read: an orderly end would wait for it.
        shared = {"abort": writer.transport.abort}
        connection = Connection(self._app, loop, self._config, self.context, shared, reader, writer)
        shared["reset"] = connection.reset
        connection.head_limits = head
        with suppress(OSError):  # the client's end of TLS can fail while ours is closed
            await connection

    async def _settle(self, limit_s: float) -> None:
        if self._open:
            await asyncio.wait(tuple(self._open), timeout=limit_s)


async def _accepted(listener: socket.socket) -> socket.socket:
    """The next connection at the door."""
    while True:
        try:
            client, _ = await asyncio.get_running_loop().sock_accept(listener)
        except OSError as failure:  # it has left, or descriptors are short
            log("accept_failed", level=logging.WARNING, error=failure.strerror)
            await asyncio.sleep(_ACCEPT_AGAIN_S)
        else:
            return client
