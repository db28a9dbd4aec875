"""A wire between tuner and proxy that can be cut: a TCP relay on a port that stays."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from tests.ports import free_port
from tests.tuner.sidecar.rig import PATIENCE_S

CHUNK = 65_536


class Relay(threading.Thread):
    """Passes bytes on to `port` while it is whole. Refuses and breaks connections while it is cut; says nothing and
    passes nothing on while it is silent. `before` is called with all bytes before they are passed on."""

    def __init__(self, port: int, before: Callable[[bytes], None] = lambda _chunk: None) -> None:
        super().__init__(daemon=True)
        self._before = before
        self.port, self._to = free_port(), port
        self._loop = asyncio.new_event_loop()
        self._open = set[asyncio.StreamWriter]()
        self._server: asyncio.Server | None = None
        self._passing = asyncio.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def run(self) -> None:
        self._loop.run_forever()

    def __enter__(self) -> Relay:
        self.start()
        self.mend()
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self.join(PATIENCE_S)
        self._loop.close()

    def cut(self) -> None:
        self._do(self._cut())

    def silence(self) -> None:
        self._loop.call_soon_threadsafe(self._passing.clear)

    def mend(self) -> None:
        self._do(self._mend())

    def _do(self, what: Coroutine[Any, Any, None]) -> None:
        done: Future[None] = asyncio.run_coroutine_threadsafe(what, self._loop)
        done.result(PATIENCE_S)

    async def _mend(self) -> None:
        self._passing.set()
        if self._server is None:
            self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)

    async def _cut(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in self._open:
            writer.transport.abort()
        while self._open:
            await asyncio.sleep(0)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            await self._passing.wait()
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._to)
            self._open.add(far_writer)
            try:
                await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))
            finally:
                self._open.discard(far_writer)
                far_writer.transport.abort()
        finally:
            self._open.discard(writer)
            writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while chunk := await reader.read(CHUNK):
                await self._passing.wait()
                self._before(chunk)
                writer.write(chunk)
                await writer.drain()
        writer.close()
