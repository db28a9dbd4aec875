"""A relay between the proxy and one engine that notes what passes: the witness of what the engine really sent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import h11


@dataclass(slots=True)
class TappedConnection:
    """One connection from the proxy to the engine."""

    to_proxy: asyncio.StreamWriter
    requests: bytearray = field(default_factory=bytearray)
    answers: bytearray = field(default_factory=bytearray)
    #: When the proxy's last bytes came, and the engine's first after them.
    asked_s: float = 0.0
    answered_s: float = 0.0
    #: Who closed it first; empty while it is open.
    closed_by: str = ""

    def note(self, sender: str) -> None:
        """Bytes came from `sender`."""
        if sender == "proxy":
            self.asked_s = time.perf_counter()
        elif self.answered_s < self.asked_s:
            self.answered_s = time.perf_counter()

    def hang_up(self) -> None:
        """Close it as the engine would."""
        self.closed_by = self.closed_by or "engine"
        self.to_proxy.close()

    def last_body(self) -> bytes:
        """Body of the last answer on this connection, without its chunked framing."""
        return bodies_of(self.answers)[-1]

    def count(self, request_line: bytes) -> int:
        return self.requests.count(request_line)


@dataclass(slots=True)
class Tap:
    """Listens in an engine's place."""

    url: str
    connections: list[TappedConnection] = field(default_factory=list)

    def count(self, request_line: bytes) -> int:
        return sum(connection.count(request_line) for connection in self.connections)

    def carrying(self, request_line: bytes) -> list[TappedConnection]:
        """Connections that carried a request which starts like this."""
        return [connection for connection in self.connections if connection.count(request_line)]


@asynccontextmanager
async def tapped(engine_url: str) -> AsyncIterator[Tap]:
    """A tap before the engine at `engine_url`; every connection is closed at the end."""
    target = urlsplit(engine_url)
    tap = Tap(url="")
    relays: set[asyncio.Task[None]] = set()

    def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = TappedConnection(writer)
        tap.connections.append(connection)
        relays.add(asyncio.create_task(_relay(connection, reader, str(target.hostname), target.port or 80)))

    server = await asyncio.start_server(accepted, "127.0.0.1", 0)
    tap.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield tap
    finally:
        server.close()
        for task in relays:
            task.cancel()
        await asyncio.gather(*relays, return_exceptions=True)


async def _relay(connection: TappedConnection, reader: asyncio.StreamReader, host: str, port: int) -> None:
    engine_reader, engine_writer = await asyncio.open_connection(host, port)
    try:
        await asyncio.gather(
            _pass(reader, engine_writer, connection.requests, connection, "proxy"),
            _pass(engine_reader, connection.to_proxy, connection.answers, connection, "engine"),
        )
    finally:
        engine_writer.close()
        connection.to_proxy.close()


async def _pass(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    record: bytearray,
    connection: TappedConnection,
    sender: str,
) -> None:
    """Copies until the sender ends, then ends the other side too."""
    try:
        while chunk := await reader.read(65_536):
            record += chunk
            connection.note(sender)
            writer.write(chunk)
            await writer.drain()
    except ConnectionError:
        pass  # A reset ends the copy as an end of file does.
    connection.closed_by = connection.closed_by or sender
    writer.close()


def bodies_of(answers: bytes | bytearray) -> list[bytes]:
    """Bodies of all complete answers in the bytes of one connection."""
    answers = bytes(answers)
    bodies: list[bytes] = []
    while answers:
        parser = h11.Connection(our_role=h11.CLIENT)
        parser.send(h11.Request(method="POST", target="/", headers=[("host", "engine"), ("content-length", "0")]))
        parser.send(h11.EndOfMessage())
        parser.receive_data(answers)
        body, event = bytearray(), parser.next_event()
        while not isinstance(event, h11.EndOfMessage):
            if event is h11.NEED_DATA:
                return bodies
            if isinstance(event, h11.Data):
                body += event.data
            event = parser.next_event()
        bodies.append(bytes(body))
        answers = parser.trailing_data[0]
    return bodies
