"""Seeded responses: well formed, odd in their grammar, or spoiled; with interim ones, and bytes behind them."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from tests.attacks.differential.framing import Maker
from tests.attacks.differential.odd_bytes import spoiled

_LINES = (b"HTTP/1.1 200 OK", b"HTTP/1.1 200 ", b"HTTP/1.1 404 Not Found", b"HTTP/1.1 500 \xe9", b"HTTP/1.0 200 OK")
_ODD_LINES = (
    b"HTTP/1.1 200", b"HTTP/1.1 204 No Content", b"HTTP/1.1 304 Not Modified", b"HTTP/1.1 101 Switching",
    b"HTTP/2.0 200 OK", b"HTTP/1.2 200 OK", b"HTTP/0.9 200 OK", b"http/1.1 200 OK", b"HTTP/1.1 20 OK",
    b"HTTP/1.1 2000 OK", b"HTTP/1.1 099 OK", b"HTTP/1.1 999 OK", b"HTTP/1.1  200 OK", b"HTTP/1.1 200 a\rb",
    b"HTTP/1.1 200 a\0b", b" HTTP/1.1 200 OK", b"\r\nHTTP/1.1 200 OK", b"ICY 200 OK", b"HTTP/1.1 -20 OK",
    b"HTTP/1.1 2x0 OK", b"HTTP/1.1\t200 OK", b"", b"HTTP/1.1", b"HTTP/1.1 205 Reset", b"HTTP/1.1 100 Continue",
)  # fmt: skip
_INTERIM = (
    b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n", b"HTTP/1.1 102 P\r\n\r\n",
)  # fmt: skip
_ODD_INTERIM = (
    b"HTTP/1.1 100 Continue\r\ncontent-length: 5\r\n\r\n", b"HTTP/1.1 101 S\r\nupgrade: x\r\n\r\n",
    b"HTTP/1.1 199 \r\n\r\n", b"HTTP/1.1 100 Continue\r\ntransfer-encoding: chunked\r\n\r\n",
    b"HTTP/1.0 100 Continue\r\n\r\n", b"HTTP/1.1 100 C\r\n\r\n" * 9, b"HTTP/1.1 100 C\r\nconnection: close\r\n\r\n",
    b"HTTP/1.1 100 C\n\n",
)  # fmt: skip
_HEADERS = (
    b"content-type: text/event-stream", b"X-A:", b"x-b:1", b"x-c: \t two words \t", b"set-cookie: a=b",
    b"set-cookie: c=d", b"x-d: \xe9\xff", b"connection: keep-alive", b"server: uvicorn",
    b"date: Mon, 01 Jan 2024 00:00:00 GMT",
)  # fmt: skip
_ODD_HEADERS = (
    b"connection: close", b"Connection: x, Close", b"connection: upgrade", b"upgrade: h2c", b"keep-alive: timeout=5",
    b"x-a : 1", b" x-a: 1", b": 1", b"x-a", b"x\0a: 1", b"x-a: \0", b"x-a: a\x01b", b"x-a: a\x7fb", b"x-a: a\x0bb",
    b"x-a: 1\r\n 2", b"x-a: 1\n 2", b"x-a: 1\r2", b"x\xe9: 1", b"(x): 1", b"x-a: " + b"y" * 900, b"content-length: 0",
    b"trailer: x", b"proxy-connection: close", b"connection: keep-alive, close", b"connection:", b"connection: \xe9",
)  # fmt: skip
_BODIES = (
    b"", b"{}", b"hello", b"data: {}\n\n" * 9, b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", bytes(range(256)),
    b"0\r\n\r\n",
)  # fmt: skip
_BEHIND = (
    b"", b"", b"", b"\r\n", b"x", b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nno",
    b"HTTP/1.1 408 T\r\nconnection: close\r\n\r\n",
)  # fmt: skip
_SPOILED = 0.35


@dataclass(frozen=True, slots=True)
class Answered:
    """What was requested, whether the connection ends behind the bytes, and whether the body is piped to a sink."""

    head_only: bool
    ended: bool
    piped: bool


def response_bytes(chance: Random) -> tuple[Answered, bytes, bool]:
    """Return the circumstances, bytes from a replica, and whether they are one well formed response alone."""
    maker = Maker(chance)
    answered = Answered(head_only=chance.random() < 0.1, ended=chance.random() < 0.6, piped=chance.random() < 0.5)
    text = b""
    if chance.random() < 0.15:
        text = maker.one(_INTERIM, _ODD_INTERIM)
    framing, body = maker.framed(chance.choice(_BODIES))
    if not framing:
        body = chance.choice(_BODIES)  # until the end of the connection
    headers = [*framing, *(maker.one(_HEADERS, _ODD_HEADERS) for _ in range(chance.randrange(4)))]
    chance.shuffle(headers)
    text += maker.head(maker.one(_LINES, _ODD_LINES), headers) + (b"" if answered.head_only else body)
    behind = chance.choice(_BEHIND) if chance.random() < 0.2 else b""
    if chance.random() < _SPOILED:
        return answered, spoiled(chance, text + behind), False
    # One without a length ends with the connection.
    return answered, text + behind, not maker.odd and not behind and (answered.ended or bool(framing))
