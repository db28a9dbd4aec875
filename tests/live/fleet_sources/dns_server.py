"""A name server on real sockets of the loopback, over UDP and TCP, with the SRV records of a test."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import cast

SRV, CNAME = 33, 5


def encode_name(name: str) -> bytes:
    return b"".join(bytes((len(label),)) + label.encode() for label in name.split(".") if label) + b"\0"


def record(kind: int, data: bytes, ttl_s: int = 30) -> bytes:
    """A record of the name in the question, by a pointer to it."""
    return struct.pack("!HHHIH", 0xC00C, kind, 1, ttl_s, len(data)) + data


def srv(target: str, port: int, ttl_s: int = 30) -> bytes:
    return record(SRV, struct.pack("!HHH", 0, 5, port) + encode_name(target), ttl_s)


@dataclass
class NameServer:
    """Records by name; a name without an entry does not exist."""

    records: dict[str, list[bytes]] = field(default_factory=dict)
    #: Code of every answer while set.
    code: int = 0
    #: Requests over UDP that get no answer, or are answered as truncated.
    drop: int = 0
    truncate: bool = False
    #: Datagrams that come before each answer over UDP.
    before: list[bytes] = field(default_factory=list)
    questions: list[tuple[str, str]] = field(default_factory=list)
    port: int = 0

    def answer(self, message: bytes, over: str) -> bytes:
        name, at = "", 12
        while message[at]:
            name += message[at + 1 : at + 1 + message[at]].decode() + "."
            at += 1 + message[at]
        name = name.rstrip(".")
        self.questions.append((over, name))
        rows = self.records.get(name)
        truncated = over == "udp" and self.truncate
        code = self.code or (3 if rows is None else 0)
        flags = 0x8180 | (0x0200 if truncated else 0) | code
        shown = [] if rows is None or truncated else rows
        return message[:2] + struct.pack("!5H", flags, 1, len(shown), 0, 0) + message[12 : at + 5] + b"".join(shown)


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, server: NameServer) -> None:
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, addr: tuple[str | int, int]) -> None:
        answer = self._server.answer(data, "udp")
        if self._server.drop:
            self._server.drop -= 1
            return
        for other in self._server.before:
            self._transport.sendto(other, addr)
        self._transport.sendto(answer, addr)


@asynccontextmanager
async def name_server() -> AsyncIterator[NameServer]:
    """A server on one free port for both transports."""
    server = NameServer()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        size = int.from_bytes(await reader.readexactly(2))
        answer = server.answer(await reader.readexactly(size), "tcp")
        writer.write(len(answer).to_bytes(2) + answer)
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    streams = await asyncio.start_server(serve, "127.0.0.1", 0)
    server.port = streams.sockets[0].getsockname()[1]
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagrams.bind(("127.0.0.1", server.port))
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(lambda: _Datagrams(server), sock=datagrams)
    try:
        yield server
    finally:
        transport.close()
        streams.close()
        await streams.wait_closed()
