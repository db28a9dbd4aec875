"""Seeded requests: well formed, odd in their grammar, or spoiled; up to four behind each other on a connection.

Some repeat a head with another length of the body: the proxy recognises such a head, and reads no other line of it
again.
"""

from __future__ import annotations

from random import Random

from tests.attacks.differential.framing import Maker
from tests.attacks.differential.odd_bytes import spoiled

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
