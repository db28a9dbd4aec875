"""Peers without manners: a client of one connection that cuts and departs, one that listens and never says a word, and
one that serves each connection as a test says.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager

# --- A client of one connection, for what a polite HTTP client hides: cut answers, sudden departures, odd requests.


class RawClient:
    """Writes bytes, reads bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def post(self, path: str, body: bytes, *headers: str, length: int | None = None) -> None:
        size = len(body) if length is None else length
        lines = [f"POST {path} HTTP/1.1", "host: gorgo", f"content-length: {size}", *headers]
        self.writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        await self.writer.drain()

    async def head(self) -> bytes:
        return await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 10)

    async def rest(self) -> bytes:
        """To the end of the connection; a reset counts as an end."""
        parts = b""
        try:
            while part := await asyncio.wait_for(self.reader.read(1 << 16), 10):
                parts += part
        except ConnectionError:
            return parts
        return parts

    def reset(self) -> None:
        """Leave as a crashed client does."""
        raw = self.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


@asynccontextmanager
async def connected(address: tuple[str, int]) -> AsyncIterator[RawClient]:
    reader, writer = await asyncio.open_connection(*address, limit=1 << 24)
    try:
        yield RawClient(reader, writer)
    finally:
        writer.close()
        try:
            await writer.wait_closed()
        except ConnectionError:
            return


# --- A peer that listens and never says a word.


@contextmanager
def silent_port(*, accepts: bool) -> Iterator[int]:
    """A port that never says a word; one that does not accept drops the first packet of a handshake."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=64 if accepts else 0))
        port: int = listener.getsockname()[1]
        for _ in range(0 if accepts else 4):
            # The kernel keeps one that nobody accepts; the others wait for it as the proxy will.
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        yield port


# --- A server of bytes, for what a polite HTTP server does not send.


@asynccontextmanager
async def listening(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]], *, limit: int = 1 << 16
) -> AsyncIterator[int]:
    """Serve each connection so, and yield the port; at the end all that are open are cut."""
    tasks: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        try:
            await serve(reader, writer)
        except asyncio.CancelledError:  # the end of the test; nobody else is told
            return
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(connected, "127.0.0.1", 0, limit=limit)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
