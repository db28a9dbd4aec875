"""A relay of TCP before a store: some routers are cut off from it while others are not."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

_CHUNK = 65536


class Relay:
    """Connections to one port. While it is cut, bytes are lost and new connections get no answer."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._open = asyncio.Event()
        self._open.set()

    @property
    def port(self) -> int:
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def cut(self) -> None:
        self._open.clear()

    def mend(self) -> None:
        self._open.set()

    async def start(self, tls: ssl.SSLContext | None) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=tls)

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with suppress(OSError):
                await self._open.wait()
                there, back = await asyncio.open_connection("127.0.0.1", self._target)
                copies = [asyncio.create_task(self._copy(reader, back)), asyncio.create_task(self._copy(there, writer))]
                try:
                    await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for copy in copies:
                        copy.cancel()
                    back.close()
        finally:
            writer.close()
            self._tasks.discard(task)

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while chunk := await source.read(_CHUNK):
                await self._open.wait()
                sink.write(chunk)
                await sink.drain()


@asynccontextmanager
async def relay(target: int, *, tls: ssl.SSLContext | None = None) -> AsyncIterator[Relay]:
    """Relay connections to `target`, a port of this machine."""
    running = Relay(target)
    await running.start(tls)
    try:
        yield running
    finally:
        await running.stop()
