"""A gate between the proxy and one engine: TCP passed on as it comes, until it is told not to.

Owns connections and doors (the listening sockets), the cut of a region in three forms, metrics that hang or stand
still, answers in the engine's place (`failing`), and the note of which request came by when. It reads no more of HTTP
than the first line and the request id of what arrives in one piece, and whole requests only where it answers them; the
proxy never pipelines, so a request begins where a piece begins.
"""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import cast

from tests.chaos.failing import FastFailure, answer_to, read_request

HOST = "127.0.0.1"
_REQUEST_ID = re.compile(rb"\r\nx-request-id: *([^\r\n]+)", re.IGNORECASE)
_FIGURES = (b"GET /metrics", b"GET /v1/loads")
#: Connections that fill the queue of a door nobody answers at: with a backlog of 0 Linux takes one, then drops SYNs.
_FILLERS = 4
_LINGER_NOT = struct.pack("ii", 1, 0)
_BACKLOG = 512


class _End(asyncio.Protocol):
    """One end of a link."""

    def __init__(self, gate: Gate, other: _End | None) -> None:
        self.gate = gate
        self.other = other
        self.transport: asyncio.Transport | None = None
        self.waiting: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.gate.ends.add(self)
        if self.gate.silent:
            # Up to Python 3.11.4 asyncio begins to read after this call, whatever was paused in it.
            asyncio.get_running_loop().call_soon(self._pause)
        for data in self.waiting:
            self.transport.write(data)
        self.waiting.clear()

    def _pause(self) -> None:
        if self.gate.silent and self.transport is not None and not self.transport.is_closing():
            self.transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            self.other.give(data)

    def give(self, data: bytes) -> None:
        """Send it on, as soon as there is a connection."""
        if self.transport is None:
            self.waiting.append(data)
        elif not self.transport.is_closing():
            self.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.gate.ends.discard(self)
        if self.other is not None:
            self.other.leave(reset=exc is not None)

    def leave(self, *, reset: bool) -> None:
        """The other end is gone: so is this one, in the same way."""
        if self.transport is None or self.transport.is_closing():
            return
        if not reset:
            self.transport.close()
            return
        # Without it Linux ends an aborted connection as any other.
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
        self.transport.abort()


class _Near(_End):
    """The proxy's end."""

    def __init__(self, gate: Gate) -> None:
        super().__init__(gate, None)
        self._connecting: asyncio.Task[None] | None = None
        #: How the request that is being read will be answered here, and what there is of it.
        self._failure: FastFailure | None = None
        self._request = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.gate.taken += 1
        self.other = _End(self.gate, self)
        self._connecting = asyncio.get_running_loop().create_task(self._connect(self.other))

    async def _connect(self, far: _End) -> None:
        try:
            await asyncio.get_running_loop().create_connection(lambda: far, HOST, self.gate.engine_port)
        except OSError:
            self.leave(reset=True)
        if self.transport is None or self.transport.is_closing():
            far.leave(reset=True)

    def data_received(self, data: bytes) -> None:
        if data.startswith(b"POST "):
            self.gate.note(data)
        if self._failure is None:
            self._failure = self.gate.failure_of(data)
        if self._failure is not None:
            self._answer(self._failure, data)
            return
        if data.startswith(_FIGURES) and self.gate.figures != "told":
            if self.gate.figures == "frozen" and self.transport is not None:
                self.transport.write(self.gate.frozen[data.split(b" ", 2)[1].decode()])
            return
        super().data_received(data)

    def _answer(self, failure: FastFailure, data: bytes) -> None:
        self._request += data
        request = read_request(self._request)
        if request is None or self.transport is None or self.transport.is_closing():
            return
        self._failure, self._request = None, b""
        answer = answer_to(request, failure)
        self.transport.write(answer.data)
        if answer.closes:
            self.transport.close()


class Gate:
    """The way to one engine, through two doors (ports) that stay the same while the engine comes and goes."""

    def __init__(self, name: str, engine_port: int, clock: Callable[[], float] = monotonic) -> None:
        self.name = name
        self.engine_port = engine_port
        self.ports: list[int] = []
        self.ends: set[_End] = set()
        #: Connections taken so far.
        self.taken = 0
        #: (request id, when) of every POST that came by.
        self.passed: list[tuple[str, float]] = []
        self.silent = False
        #: How requests are answered here; None passes them on.
        self.failure: FastFailure | None = None
        self.figures = "told"
        self.frozen: dict[str, bytes] = {}
        self._clock = clock
        self._servers: list[asyncio.Server] = []
        self._dark: list[socket.socket] = []

    @property
    def open_links(self) -> int:
        """Of the proxy."""
        return sum(isinstance(end, _Near) for end in self.ends)

    def failure_of(self, data: bytes) -> FastFailure | None:
        """Return how a request that begins with `data` is answered here; None if it is passed on."""
        failure = self.failure
        if failure is None:
            return None
        return failure if data.startswith((b"POST ", b"GET ") if failure.on_probes else b"POST ") else None

    def note(self, data: bytes) -> None:
        found = _REQUEST_ID.search(data.partition(b"\r\n\r\n")[0] + b"\r\n")
        if found is not None:
            self.passed.append((found[1].decode("ascii", "replace"), self._clock()))

    # -- doors

    async def open(self) -> None:
        """Listen, on the ports of before if there were any."""
        loop = asyncio.get_running_loop()
        for port in self.ports or (0, 0):
            self._servers.append(await loop.create_server(lambda: _Near(self), HOST, port, backlog=_BACKLOG))
        self.ports = [server.sockets[0].getsockname()[1] for server in self._servers]

    def shut(self) -> None:
        """Refuse connections from now on."""
        for server in self._servers:
            server.close()
        self._servers.clear()

    async def close(self) -> None:
        self.shut()
        self._lighten()
        self.reset()

    # -- what can be wrong

    def reset(self) -> None:
        """Reset all connections."""
        for end in list(self.ends):
            end.leave(reset=True)

    def cut(self, how: str) -> None:
        """`refused`, `silent` or `dark`, until `mend`."""
        if how == "refused":
            self.shut()
            self.reset()
            return
        self.silent = True
        for end in self.ends:
            if end.transport is not None and not end.transport.is_closing():
                end.transport.pause_reading()
        if how == "dark":
            self.shut()
            self._darken()

    async def mend(self, how: str) -> None:
        """The way is open again; what stood still goes on where it was only silent."""
        self.silent = False
        if how == "dark":
            self.reset()
            self._lighten()
        for end in self.ends:
            if end.transport is not None and not end.transport.is_closing():
                end.transport.resume_reading()
        if not self._servers:
            await self.open()

    async def freeze_figures(self) -> None:
        """From now on the engine's figures are those of this moment."""
        for path in ("/metrics", "/v1/loads?include=core"):
            self.frozen[path] = await _fetch(self.engine_port, path)
        self.figures = "frozen"

    def _darken(self) -> None:
        for port in self.ports:
            door = socket.socket()
            door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            door.bind((HOST, port))
            door.listen(0)
            self._dark.append(door)
            for _ in range(_FILLERS):
                filler = socket.socket()
                filler.setblocking(False)
                self._dark.append(filler)
                with suppress(BlockingIOError):
                    filler.connect((HOST, port))

    def _lighten(self) -> None:
        for each in self._dark:
            each.close()
        self._dark.clear()


async def _fetch(port: int, path: str) -> bytes:
    """An answer as it is on the wire: head and body."""
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nhost: {HOST}\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"\r\ncontent-length: *(\d+)", head, re.IGNORECASE)
        assert length is not None, "a small answer of the simulated engine has its length"
        return head + await reader.readexactly(int(length[1]))
    finally:
        writer.close()
