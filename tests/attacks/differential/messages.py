"""Seeded requests and responses: well formed, odd in their grammar, or spoiled; with what both have in common."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from tests.attacks.differential.odd_bytes import spoiled

# --- What requests and responses have in common: lines, lengths, codings and chunks, ordinary or odd.


_ODD_LENGTHS = (
    b"content-length: +%d", b"content-length: -%d", b"content-length:%d", b"Content-Length:\t%d \t",
    b"content-length : %d", b"content-length: 0%d", b"content-length: %d, %d",
    b"content-length: %d\r\ncontent-length: %d", b"content-length: 0x%x", b"content-length: %d.0",
    b"content-length: 1_%d", b"content-length: %d\r\nContent-Length: 7", b"content-length: 1%019d",
    b"content-length: %d;", b"content-length: ", b"content_length: %d", b"content-length: %d %d",
    b"content-length: %d\r\ntransfer-encoding: chunked", b"content-length: %d\x0b",
)  # fmt: skip
_ODD_CODINGS = (
    b"transfer-encoding: chunked\r\ncontent-length: 5", b"Transfer-Encoding: CHUNKED", b"transfer-encoding:chunked\t",
    b"transfer-encoding: identity", b"transfer-encoding: gzip, chunked", b"transfer-encoding: chunked, chunked",
    b"transfer-encoding: chunked\r\ntransfer-encoding: chunked",
    b"transfer-encoding: chunked\r\ntransfer-encoding: identity", b"transfer-encoding: xchunked",
    b'transfer-encoding: "chunked"', b"transfer-encoding: ,chunked", b"transfer-encoding : chunked",
    b"transfer-encoding: chunked;q=1", b"transfer-encoding:", b"transfer-encoding:\r\n chunked",
    b"transfer_encoding: chunked", b"transfer-encoding: \x0bchunked", b"transfer-encoding: chunked,",
    b"transfer-encoding: chun\xe9ked",
)  # fmt: skip
_ODD_SIZES = (
    b"%x ",
    b" %x",
    b"+%x",
    b"0x%x",
    b"%x\t",
    b"-%x",
    b"%017x",
    b"%016x",
    b"%020x",
    b"%021x",
    b"%x;a=b",
    b'%x;a="b;c"',
    b"%x;a\rb",
    b"%x;\0",
    b"%x;\xe9",
    b"%x ;a",
    b"%x;" + b"e" * 400,
)
_ODD_ENDS = (b"\n", b"\r", b"\r\r\n", b" \r\n", b"")
_TRAILERS = (b"x-t: 1", b"x-t: 1\r\nx-u: 2")
_ODD_TRAILERS = (
    b"content-length: 5",
    b"content-length: x",
    b"transfer-encoding: gzip",
    b"x-t : 1",
    b" x: 1",
    b"x-t",
    b"x-t: 1\r\n 2",
    b"x-t: 1\n",
    b"x-t: \0",
    b"x-t: 1\r",
    b": 2",
    b"x-t: " + b"t" * 900,
)
#: Share of odd parts.
_ODD = 0.06


class Maker:
    """Makes the parts of a message; `odd` if any of them is."""

    def __init__(self, chance: Random) -> None:
        self.chance = chance
        self.odd = False

    def framed(self, body: bytes) -> tuple[list[bytes], bytes]:
        """Return the headers that say where the body ends, and the body in its framing."""
        match self.chance.randrange(3):
            case 0:
                return [], b""
            case 1:
                return [self._length(len(body))], body
            case _:
                return [self.one((b"transfer-encoding: chunked",), _ODD_CODINGS)], self._chunks(body)

    def head(self, first: bytes, headers: list[bytes]) -> bytes:
        return b"".join(line + self._end() for line in (first, *headers)) + self._end()

    def one(self, ordinary: tuple[bytes, ...], odd: tuple[bytes, ...]) -> bytes:
        return self.chance.choice(ordinary if self.is_ordinary(1 - _ODD) else odd)

    def is_ordinary(self, share: float) -> bool:
        """Return whether to be ordinary here."""
        if self.chance.random() < share:
            return True
        self.odd = True
        return False

    def _length(self, size: int) -> bytes:
        form = self.one((b"content-length: %d",), _ODD_LENGTHS)
        return form % ((size,) * form.count(b"%"))

    def _chunks(self, body: bytes) -> bytes:
        text = b""
        while body:
            take = self.chance.randint(1, len(body))
            text += self._size(take) + self._end() + body[:take] + self._end()
            body = body[take:]
        text += self._size(0) + self._end()
        if self.chance.random() < 0.2:
            text += self.one(_TRAILERS, _ODD_TRAILERS) + self._end()
        return text + self._end()

    def _size(self, size: int) -> bytes:
        return self.one((b"%x", b"%X", b"%x;ext", b"%04x"), _ODD_SIZES) % size

    def _end(self) -> bytes:
        return b"\r\n" if self.is_ordinary(0.995) else self.chance.choice(_ODD_ENDS)


# --- Seeded requests: well formed, odd in their grammar, or spoiled; up to four behind each other on a connection.
#
# Some repeat a head with another length of the body: the proxy recognises such a head, and reads no other line of it
# again.


_METHODS = (b"GET", b"POST", b"PUT", b"HEAD", b"OPTIONS", b"DELETE", b"PATCH", b"QUERY")
_ODD_METHODS = (
    b"CONNECT",
    b"PRI",
    b"post",
    b"M-SEARCH",
    b"P0ST",
    b"G\xc3T",
    b"A" * 40,
    b"",
    b"GET\t",
    b" GET",
    b"\r\nGET",
)
_TARGETS = (b"/", b"/health", b"/v1/chat/completions", b"/a?b=c&d=%20", b"/%00", b"//g/a", b"/a;b", b"/~!$'()*+,:@[]")
_ODD_TARGETS = (
    b"*", b"http://g/", b"g:80", b"a", b"", b"/a b", b"/\x80", b"/a#b", b"/\0", b"/a\tb", b"?a", b"/" + b"x" * 1200,
    b"\\", b"/|^{}",
)  # fmt: skip
_ODD_VERSIONS = (
    b"HTTP/1.0", b"HTTP/1.2", b"HTTP/2.0", b"HTTP/0.9", b"HTTP/1.11", b"http/1.1", b"HTTP/1.1 ", b"HTTP/1,1", b"",
    b"HTTP/11", b"ICE/1.1",
)  # fmt: skip
_HEADERS = (
    b"accept: */*", b"Content-Type: application/json", b"x-a:", b"x-b:1", b"X-C: \t two words \t",
    b"cookie: a=b; c=\"d\"", b"x-d: \xe9\xff", b"connection: keep-alive", b"x-request-id: 1",
    b"authorization: Bearer k", b"x_e: f", b"!#$%&'*+.^_`|~-: all",
)  # fmt: skip
_ODD_HEADERS = (
    b"connection: close", b"Connection: x, Close", b"connection: upgrade", b"upgrade: h2c", b"upgrade: websocket",
    b"expect: 100-continue", b"expect: 200-ok", b"host: other", b"Host:", b"host: a b", b"x-a : 1", b" x-a: 1",
    b"\tx: y", b": 1", b"x-a", b"x\0a: 1", b"x-a: \0", b"x-a: a\x01b", b"x-a: a\x7fb", b"x-a: a\x0bb",
    b"x-a: 1\r\n 2", b"x-a: 1\r\n\t2", b"x-a: 1\n 2", b"x-a: 1\r2", b"x\xe9: 1", b"(x): 1", b"x-a: " + b"y" * 900,
    b"content-length: 0", b"te: trailers", b"trailer: x", b"http2-settings: AAAA", b"proxy-connection: close",
    b"keep-alive: 5", b"Upgrade: ",
)  # fmt: skip

_BODIES = (b"", b"{}", b"hello", b"0\r\n\r\n", b"GET /x HTTP/1.1\r\nhost: g\r\n\r\n", bytes(range(256)))
_SPOILED = 0.35
_REPEATED = 0.3
#: Words for a length, in place of its digits.
_ODD_WORDS = (
    b"+%d", b"-%d", b"0%d", b"%d ", b"\t%d", b" %d", b"%d\r\n", b"%d\x0b", b"%d\0", b"%d, %d", b"", b"1%019d", b"%d.0",
    b"\xb2", b"%015d", b"%016d", b"%d\r\nx-a: 1", b"%d\r\ncontent-length: %d", b"%d\r\ntransfer-encoding: chunked",
)  # fmt: skip
_NAMES = (b"content-length: ", b"Content-Length: ", b"CONTENT-LENGTH: ", b"content-length:")


def request_bytes(chance: Random) -> tuple[bytes, bool]:
    """Return bytes of a connection, and whether they are well formed requests alone."""
    maker = Maker(chance)
    if chance.random() < _REPEATED:
        text = _repeated(maker)
    else:
        text = b"".join(_request(maker) for _ in range(chance.choice((1, 1, 1, 2, 3))))
    if chance.random() < _SPOILED:
        return spoiled(chance, text), False
    return text, not maker.odd


def _request(maker: Maker) -> bytes:
    framing, body = maker.framed(maker.chance.choice(_BODIES))
    return _head(maker, framing) + body


def _repeated(maker: Maker) -> bytes:
    """Return up to four requests with one head but for the length."""
    chance = maker.chance
    head = _head(maker, [chance.choice(_NAMES) + b"@LENGTH@"])
    texts = []
    for _ in range(chance.randint(2, 4)):
        body = chance.choice(_BODIES)
        word = maker.one((b"%d",), _ODD_WORDS)
        length = word.replace(b"%d", b"%d" % len(body)) if b"%0" not in word else word % len(body)
        texts.append(head.replace(b"@LENGTH@", length) + body)
    return b"".join(texts)


def _head(maker: Maker, framing: list[bytes]) -> bytes:
    chance = maker.chance
    first = b"%b %b %b" % (
        maker.one(_METHODS, _ODD_METHODS),
        maker.one(_TARGETS, _ODD_TARGETS),
        maker.one((b"HTTP/1.1",), _ODD_VERSIONS),
    )
    headers = [*framing, *(maker.one(_HEADERS, _ODD_HEADERS) for _ in range(chance.randrange(4)))]
    if maker.is_ordinary(0.98):
        headers.append(b"host: g")
    chance.shuffle(headers)
    return maker.head(first, headers)


# --- Seeded responses: well formed, odd in their grammar, or spoiled; with interim ones, and bytes behind them.


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
_HEADERS_RESPONSES = (
    b"content-type: text/event-stream", b"X-A:", b"x-b:1", b"x-c: \t two words \t", b"set-cookie: a=b",
    b"set-cookie: c=d", b"x-d: \xe9\xff", b"connection: keep-alive", b"server: uvicorn",
    b"date: Mon, 01 Jan 2024 00:00:00 GMT",
)  # fmt: skip
_ODD_HEADERS_RESPONSES = (
    b"connection: close", b"Connection: x, Close", b"connection: upgrade", b"upgrade: h2c", b"keep-alive: timeout=5",
    b"x-a : 1", b" x-a: 1", b": 1", b"x-a", b"x\0a: 1", b"x-a: \0", b"x-a: a\x01b", b"x-a: a\x7fb", b"x-a: a\x0bb",
    b"x-a: 1\r\n 2", b"x-a: 1\n 2", b"x-a: 1\r2", b"x\xe9: 1", b"(x): 1", b"x-a: " + b"y" * 900, b"content-length: 0",
    b"trailer: x", b"proxy-connection: close", b"connection: keep-alive, close", b"connection:", b"connection: \xe9",
)  # fmt: skip
_BODIES_RESPONSES = (
    b"", b"{}", b"hello", b"data: {}\n\n" * 9, b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", bytes(range(256)),
    b"0\r\n\r\n",
)  # fmt: skip
_BEHIND = (
    b"", b"", b"", b"\r\n", b"x", b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nno",
    b"HTTP/1.1 408 T\r\nconnection: close\r\n\r\n",
)  # fmt: skip


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
    framing, body = maker.framed(chance.choice(_BODIES_RESPONSES))
    if not framing:
        body = chance.choice(_BODIES_RESPONSES)  # until the end of the connection
    headers = [*framing, *(maker.one(_HEADERS_RESPONSES, _ODD_HEADERS_RESPONSES) for _ in range(chance.randrange(4)))]
    chance.shuffle(headers)
    text += maker.head(maker.one(_LINES, _ODD_LINES), headers) + (b"" if answered.head_only else body)
    behind = chance.choice(_BEHIND) if chance.random() < 0.2 else b""
    if chance.random() < _SPOILED:
        return answered, spoiled(chance, text + behind), False
    # One without a length ends with the connection.
    return answered, text + behind, not maker.odd and not behind and (answered.ended or bool(framing))
