"""Engines that write whatever bytes a test wants, and how far memory rises meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.proxy.raw import listening

# --- An engine that writes whatever bytes a test wants, true or not.


Speaker = Callable[[asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Liar:
    """Answers each POST by its speaker and every other request with an honest 404."""

    speak: Speaker
    posts: int = 0
    port: int = 0
    #: Connections over which something was asked.
    connections: int = 0
    #: Bytes of requests, heads included.
    heard: list[bytes] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(length(head))
                if not head.startswith(b"POST"):
                    writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
                    continue
                self.posts += 1
                self.heard.append(head)
                await self.speak(writer)
                await writer.drain()
                if writer.is_closing():
                    await writer.wait_closed()
                    break


def length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return 0


def says(*parts: bytes, close: bool = False) -> Speaker:
    """Writes `parts`, one after the other, then closes the connection or leaves it."""

    async def speak(writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
            # Parts are to arrive as parts.
            await asyncio.sleep(0.01 if len(parts) > 1 else 0)
        if close:
            writer.close()

    return speak


def forever(begin: bytes, again: bytes) -> Speaker:
    """Writes until nobody takes it."""

    async def speak(writer: asyncio.StreamWriter) -> None:
        writer.write(begin)
        while True:
            writer.write(again)
            await writer.drain()
            # `drain` does not yield while there is room.
            await asyncio.sleep(0)

    return speak


@asynccontextmanager
async def lying(speak: Speaker) -> AsyncIterator[Liar]:
    liar = Liar(speak)
    async with listening(liar.serve, limit=1 << 26) as liar.port:
        yield liar


# --- How far a piece of a test raises the memory of its process, whatever the tests before it took.


_PROCESS = Path("/proc/self")


@contextmanager
def peak_growth() -> Iterator[Callable[[], int]]:
    """Bytes of the highest resident memory since the beginning, above that of the beginning.

    Linux resets its high-water mark at the beginning. `ru_maxrss` is no such measure: it is the highest of the whole
    process, so that after one large test it does not move any more.
    """
    (_PROCESS / "clear_refs").write_text("5")
    before = _status("VmRSS")
    yield lambda: _status("VmHWM") - before


def _status(name: str) -> int:
    lines = (_PROCESS / "status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024
