"""An engine on a real socket that answers as a test says, byte for byte, and the client to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from gorgo.live.upstream.client import ResponseSource, UpstreamClient
from tests.proxy.conftest import system_tls

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

Speak = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Engine:
    """What was received, by connection, up to each answer."""

    server: asyncio.Server

    def __init__(self, speak: Speak) -> None:
        self._speak = speak
        self.connections = 0
        self.open = 0

    async def met(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        try:
            await self._speak(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.open -= 1
            writer.transport.abort()


@asynccontextmanager
async def listening(speak: Speak) -> AsyncIterator[tuple[str, Engine]]:
    """An engine that speaks so on each connection, and its URL."""
    found = Engine(speak)
    found.server = server = await asyncio.start_server(found.met, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", found
    finally:
        server.close()
        await server.wait_closed()


@asynccontextmanager
async def engine(speak: Speak) -> AsyncIterator[tuple[UpstreamClient, Engine]]:
    """An engine that speaks so on each connection, and the client to it."""
    async with listening(speak) as (url, found):
        upstream = UpstreamClient(f"{url}/base/", connections=4, connect_timeout_s=5.0, tls=system_tls())
        try:
            yield upstream, found
        finally:
            await upstream.aclose()


async def whole(source: ResponseSource) -> bytes:
    async with source.chunks() as chunks:
        body = b"".join([chunk async for chunk in chunks])
    await source.aclose()
    return body
