"""The floor: a relay in Python that does nothing but relay, with uvloop's protocols and httptools on both sides.

No routing (replicas in turn), no checks, limits, retries, timeouts, metrics or logs: what remains is reading HTTP/1.1
twice and writing the same bytes once. `python -m tests.bench.relay.floor PORT REPLICA_PORT ...` serves until SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import signal
from collections.abc import Iterator, Sequence
from typing import cast

import httptools
import uvloop


class _Replica(asyncio.Protocol):
    """A connection to a replica: what comes on it goes to the client whose request it has."""

    def __init__(self, idle: list[_Replica]) -> None:
        self._idle = idle
        self._parser = httptools.HttpResponseParser(self)
        self._client: _Client | None = None
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's own class

    def send(self, client: _Client, request: bytes) -> None:
        self._client = client
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        client = self._client
        self._parser.feed_data(data)
        if client is not None:
            client.transport.write(data)

    def on_message_complete(self) -> None:
        if self._client is not None:
            self._client.replica = None
        self._client = None
        self._parser = httptools.HttpResponseParser(self)
        self._idle.append(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self in self._idle:
            self._idle.remove(self)
        if self._client is not None:
            self._client.transport.abort()


class _Client(asyncio.Protocol):
    """A client's connection; a request goes to the next replica when it is complete."""

    def __init__(self, replicas: Iterator[tuple[int, list[_Replica]]]) -> None:
        self._replicas = replicas
        self._parser = httptools.HttpRequestParser(self)
        self._received: list[bytes] = []
        self._connecting: asyncio.Task[None] | None = None
        self.replica: _Replica | None = None
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's own class

    def data_received(self, data: bytes) -> None:
        self._received.append(data)
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        request = b"".join(self._received)
        self._received.clear()
        port, idle = next(self._replicas)
        if idle:
            self.replica = idle.pop()
            self.replica.send(self, request)
        else:
            self._connecting = asyncio.get_running_loop().create_task(self._connect(port, idle, request))

    def connection_lost(self, exc: Exception | None) -> None:
        if self.replica is not None:
            self.replica.transport.abort()

    def pause_writing(self) -> None:
        if self.replica is not None:
            self.replica.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.replica is not None:
            self.replica.transport.resume_reading()

    async def _connect(self, port: int, idle: list[_Replica], request: bytes) -> None:
        loop = asyncio.get_running_loop()
        _, self.replica = await loop.create_connection(lambda: _Replica(idle), "127.0.0.1", port)
        self.replica.send(self, request)


async def _serve(port: int, replica_ports: Sequence[int]) -> None:
    loop = asyncio.get_running_loop()
    idle: list[list[_Replica]] = [[] for _ in replica_ports]
    replicas = itertools.cycle(zip(replica_ports, idle, strict=True))
    await loop.create_server(lambda: _Client(replicas), "127.0.0.1", port, backlog=2048)
    stopped = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stopped.set)
    await stopped.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("replicas", type=int, nargs="+")
    options = parser.parse_args()
    uvloop.run(_serve(options.port, options.replicas))


if __name__ == "__main__":
    main()
