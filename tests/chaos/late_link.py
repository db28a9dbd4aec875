"""A link between Envoy and a picker on which the picker's answers come late."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from time import monotonic

HOST = "127.0.0.1"
_RECEIVED_MAX = 1 << 16


class LateLink:
    """Passes on bytes of TCP, those from `port` after `late_s`, in order.

    Parameters
    ----------
    port:
        Of the picker.
    """

    def __init__(self, port: int) -> None:
        self.late_s = 0.0
        self._port = port
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> int:
        """Listen; return the port."""
        self._server = await asyncio.start_server(self._accept, HOST, 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def close(self) -> None:
        """Stop listening, and close all connections."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, near: asyncio.StreamReader, near_out: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            far, far_out = await asyncio.open_connection(HOST, self._port)
        except OSError:
            near_out.close()
            return
        late: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        ways = [_pass(near, far_out), self._delay(far, late), _deliver(late, near_out)]
        under_way = [asyncio.ensure_future(each) for each in ways]
        try:
            # The end of any of them is that of the connection.
            with suppress(asyncio.CancelledError):
                await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in under_way:
                each.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)
            near_out.close()
            far_out.close()

    async def _delay(self, source: asyncio.StreamReader, late: asyncio.Queue[tuple[float, bytes]]) -> None:
        while data := await source.read(_RECEIVED_MAX):
            late.put_nowait((monotonic() + self.late_s, data))


async def _pass(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while data := await source.read(_RECEIVED_MAX):
        sink.write(data)
        await sink.drain()


async def _deliver(late: asyncio.Queue[tuple[float, bytes]], sink: asyncio.StreamWriter) -> None:
    """Write each piece when it is due; one that is due before an earlier one waits for it."""
    while True:
        due_s, data = await late.get()
        await asyncio.sleep(max(0.0, due_s - monotonic()))
        sink.write(data)
        await sink.drain()
