"""One listening socket with hypercorn's connections on it.

Owns accepting, the number of open connections, and their end: when the client disconnects, and when the proxy stops.
HTTP/1.1 on a connection is hypercorn's behind the checks of `http1`; there is no other protocol.

Why not `hypercorn.asyncio.serve`: in hypercorn 0.18 a connection that its client closed between two requests stays open
until the keep-alive timeout, because its close waits for the task of that timeout. With 75 s and 100 new connections a
second, 7,500 descriptors stay open. `Connection` ends that task with the connection. It also uses `StrictProtocol`;
hypercorn's own choice is lenient and would switch to HTTP/2.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import struct
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from hypercorn.asyncio.task_group import TaskGroup
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from hypercorn.events import Event, Updated
from hypercorn.typing import ConnectionState
from hypercorn.utils import parse_socket_addr, wrap_app

from gorgo.proxy.http.heads import HeadLimits, PartialHeads
from gorgo.proxy.http.http1 import StrictProtocol
from gorgo.proxy.logs import log

#: `struct linger`: close at once, with a reset.
_NO_LINGERING = struct.pack("ii", 1, 0)
#: A client that reads nothing of its response for this long is disconnected; proxies before it idle no longer, s.
LINGER_S = 30.0
#: Pause after a failed accept, as in asyncio's servers.
_ACCEPT_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class AcceptLimits:
    """Limits of new connections.

    `connections` may be open at once. One more ends the connection that has been idle for longest. If none is idle, it
    is closed without a response, which would need the resources in short supply.
    """

    head: HeadLimits
    connections: int


class _LingerTimeout:
    """Aborts a connection whose client reads nothing of its response; an orderly end would wait for it for ever."""

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.WriteTransport) -> None:
        self._loop = loop
        self._transport = transport
        self._left = _unsent_bytes(transport)
        self._timer = loop.call_later(LINGER_S, self._check)

    def stop(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        before, self._left = self._left, _unsent_bytes(self._transport)
        if self._left >= before:
            self._transport.abort()
        else:
            self._timer = self._loop.call_later(LINGER_S, self._check)


def _unsent_bytes(transport: asyncio.WriteTransport) -> int:
    """Return the size of the write buffer; 0 for a closed TLS transport of uvloop, which has no buffer."""
    try:
        return transport.get_write_buffer_size()
    except AttributeError:
        return 0


class Connection(TCPServer):
    """hypercorn's connection, which ends when its client disconnects."""

    _disconnected = False
    _reset = False
    #: Called with whether the connection waits for a request, at each change.
    on_idle: Callable[[bool], None] = staticmethod(lambda _: None)
    head_limits = HeadLimits(64 * 1024, 10.0)
    partial_heads = PartialHeads()

    async def run(self) -> None:
        """Run as hypercorn does, with `StrictProtocol`: hypercorn has no parameter for it."""
        socket, tls = self.writer.get_extra_info("socket"), self.writer.get_extra_info("ssl_object")
        try:
            client = parse_socket_addr(socket.family, socket.getpeername())
            server = parse_socket_addr(socket.family, socket.getsockname())
            async with TaskGroup(self.loop) as tasks:
                self._task_group = tasks
                state = ConnectionState(self.state)
                args = (self.app, self.config, self.context, tasks, state, tls is not None, client, server)
                # hypercorn's wrapper would choose a protocol; here there is one.
                protocol = StrictProtocol(self.head_limits, self.partial_heads, *args, self.protocol_send)
                self.protocol = protocol  # type: ignore[assignment]
                await protocol.initiate()
                await self.idle_task.restart(tasks, self._idle_timeout)
                try:
                    await self._read_data()
                finally:
                    protocol.release()
        except OSError:
            pass  # disconnected before a request
        finally:
            await self._close()

    async def protocol_send(self, event: Event) -> None:
        # The end of a response to a disconnected client must not start the wait for the next request.
        if isinstance(event, Updated):
            self.on_idle(event.idle)
            if self._disconnected:
                return
        await super().protocol_send(event)

    def reset(self) -> None:
        """Reset the connection; unsent bytes are dropped."""
        client = self.writer.get_extra_info("socket")
        with suppress(OSError):  # disconnected
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGERING)
        self._reset = True
        self.writer.transport.abort()

    async def _close(self) -> None:
        if self._reset:  # uvloop would send an orderly end before
            await self.idle_task.stop()
            return
        linger = _LingerTimeout(self.loop, self.writer.transport)
        try:
            await super()._close()
        finally:
            linger.stop()

    async def _read_data(self) -> None:
        await super()._read_data()
        self._disconnected = True
        await self.idle_task.stop()


async def serve_app(
    app: Any,
    config: Config,
    listener: socket.socket,
    closing: asyncio.Event,
    *,
    limits: Callable[[], AcceptLimits],
    tls: ssl.SSLContext | None = None,
) -> None:
    """Serve connections until `closing` is set; then end idle ones at once and the others within
    `config.graceful_timeout`. The listener is closed on return.

    `limits` is called for each connection. With `tls` the handshake has the timeout of a request's head, and its
    connection counts as open.
    """
    open_now = _Connections(app, config, limits)
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
    """The open connections of one listener, each with its task."""

    def __init__(self, app: Any, config: Config, limits: Callable[[], AcceptLimits]) -> None:
        self._app = wrap_app(app, config.wsgi_max_body_size, "asgi")
        self._config = config
        self._limits = limits
        #: No writer during the TLS handshake.
        self._open: dict[asyncio.Task[Any], asyncio.StreamWriter | None] = {}
        #: Those without a request in progress, the one that is idle for longest first; none is evicted twice.
        self._idle: OrderedDict[asyncio.Task[Any], None] = OrderedDict()
        self._partial_heads = PartialHeads()
        self.context = WorkerContext(None)

    async def accept_socket(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection without TLS."""
        head = self._admit()
        if head is None:
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        self._track(task)
        await self._serve(reader, writer, head)

    async def accept(self, listener: socket.socket, tls: ssl.SSLContext) -> None:
        """Accept connections with TLS. asyncio's server would count them only after the handshake."""
        listener.setblocking(False)
        while True:
            client = await _accept(listener)
            head = self._admit()
            if head is None:
                client.close()
            else:
                self._track(asyncio.create_task(self._handshake(client, tls, head)))
            await asyncio.sleep(0)  # other tasks run between two of a burst

    async def end(self, limit_s: float) -> None:
        """Wait, then cancel, then abort: an orderly end waits for a client to read the rest, and some never do."""
        await self._wait_closed(limit_s)
        for task in tuple(self._open):
            task.cancel()
        await self._wait_closed(limit_s)
        for writer in tuple(self._open.values()):
            if writer is not None:
                writer.transport.abort()
        await self._wait_closed(limit_s)

    def _admit(self) -> HeadLimits | None:
        """Return the head limits of a new connection; None if there are too many, all with a request."""
        limits = self._limits()
        if len(self._open) < limits.connections:
            return limits.head
        if not self._idle:
            return None
        task, _ = self._idle.popitem(last=False)
        writer = self._open.pop(task)  # no longer counted
        if writer is None:
            task.cancel()
        else:
            writer.transport.abort()
        return limits.head

    def _track(self, task: asyncio.Task[Any]) -> None:
        self._open[task] = None
        self._idle[task] = None
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._open.pop(task, None)
        self._idle.pop(task, None)

    def _set_idle(self, task: asyncio.Task[Any], idle: bool) -> None:
        self._idle.pop(task, None)
        if idle and task in self._open:
            self._idle[task] = None  # at the end

    async def _handshake(self, client: socket.socket, tls: ssl.SSLContext, head: HeadLimits) -> None:
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        with suppress(OSError):  # disconnected, too slow, or another protocol
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol, client, ssl=tls, ssl_handshake_timeout=head.timeout_s
            )
            await self._serve(reader, asyncio.StreamWriter(transport, protocol, reader, loop), head)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: HeadLimits) -> None:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        if writer.transport.is_closing():  # disconnected during the handshake
            return
        self._open[task] = writer
        # An orderly end would wait for a client that does not read.
        shared = {"abort": writer.transport.abort}
        connection = Connection(self._app, loop, self._config, self.context, shared, reader, writer)
        shared["reset"] = connection.reset
        connection.head_limits, connection.partial_heads = head, self._partial_heads
        connection.on_idle = partial(self._set_idle, task)
        with suppress(OSError):  # the client may fail the TLS shutdown
            await connection

    async def _wait_closed(self, limit_s: float) -> None:
        if self._open:
            await asyncio.wait(tuple(self._open), timeout=limit_s)


async def _accept(listener: socket.socket) -> socket.socket:
    """Return the next connection."""
    while True:
        try:
            client, _ = await asyncio.get_running_loop().sock_accept(listener)
        except OSError as failure:  # disconnected, or out of descriptors
            log("accept_failed", level=logging.WARNING, error=failure.strerror)
            await asyncio.sleep(_ACCEPT_AGAIN_S)
        else:
            return client
