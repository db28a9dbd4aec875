"""A server on a free port, with an echo in place of the picker's calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from gorgo.config.model import PickerTlsConfig
from gorgo.core.limits import BufferBudget
from gorgo.picker.protocol.messages import ProtocolError
from gorgo.picker.transport.server import Http2Server
from gorgo.picker.transport.services import PROCESS, CallHandlers, Health, Output, Services, TransportLimits, services


@dataclass
class EchoCall:
    """Answers as the message says: `later ...` after the call has returned, `end`, `wrong`, `broken`."""

    output: Output
    received: list[bytes] = field(default_factory=list)
    ends: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def feed(self, message: bytes) -> None:
        self.received.append(message)
        word = message[:8].partition(b" ")[0]
        if word == b"end":
            self.output.send_message(b"last")
            self.output.end_call()
        elif word == b"wrong":
            raise ProtocolError("expected another word")
        elif word == b"broken":
            raise ZeroDivisionError
        elif word == b"later":
            asyncio.get_running_loop().call_later(0.01, self.output.send_message, b"late")
        elif word == b"endlater":
            asyncio.get_running_loop().call_later(0.01, self.output.end_call)
        elif word == b"pieces":
            for number in range(int(message.split()[1])):
                self.output.send_message(b"%d " % number + b"x" * 60_000)
        elif word != b"quiet":
            self.output.send_message(b"echo " + message)

    def closed(self) -> None:
        self.ends += 1
        self.ended.set()


# --- A server on a free port, with an echo in place of the picker's calls.


MESSAGE_BYTES = 1_000_000


@dataclass
class Served:
    """A running server."""

    server: Http2Server
    services: Services
    health: Health
    port: int
    calls: list[EchoCall]
    entries: list[bytes]
    closing: asyncio.Event
    task: asyncio.Task[None]
    #: What `is_ready` returns.
    ready: list[bool]
    channels: list[Any] = field(default_factory=list)

    def channel(self, *, trusting: bytes | None = None, shown: tuple[str, str] | None = None) -> Any:
        """A new connection; `trusting`: by TLS, to a server that this authority has certified.

        `shown` is the client's own certificate, with its key.
        """
        # A channel of its own has a connection of its own.
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        options.append(("grpc.use_local_subchannel_pool", 1))
        target = f"127.0.0.1:{self.port}"
        if trusting is None:
            channel = grpc.aio.insecure_channel(target, options=options)
        else:
            cert, key = (None, None) if shown is None else (Path(file).read_bytes() for file in shown)
            credentials = grpc.ssl_channel_credentials(trusting, key, cert)
            channel = grpc.aio.secure_channel(target, credentials, options=options)
        self.channels.append(channel)
        return channel

    def call(self, channel: Any, method: str = PROCESS) -> Any:
        """Open a call of bytes."""
        return channel.stream_stream(method)()


@asynccontextmanager
async def serving(*, tls: PickerTlsConfig | None = None, calls: int = 100) -> AsyncIterator[Served]:
    """Serve the echo."""
    opened: list[EchoCall] = []
    entries: list[bytes] = []
    ready = [True]

    def process(output: Output) -> CallHandlers:
        opened.append(EchoCall(output))
        return CallHandlers(opened[-1].feed, opened[-1].closed)

    health = Health(lambda: ready[0])
    served = services(process, entries.append, health)
    server = Http2Server(served, TransportLimits(MESSAGE_BYTES, calls), BufferBudget(64 * MESSAGE_BYTES))
    _, port = server.bind("127.0.0.1:0", tls or PickerTlsConfig())
    closing = asyncio.Event()
    task = asyncio.create_task(server.serve_calls(closing))
    running = Served(server, served, health, port, opened, entries, closing, task, ready)
    try:
        yield running
    finally:
        for channel in running.channels:
            await channel.close()
        closing.set()
        await asyncio.wait_for(task, 10)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving() as running:
        yield running
