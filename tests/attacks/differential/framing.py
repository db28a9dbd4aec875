"""What requests and responses have in common: lines, lengths, codings and chunks, ordinary or odd."""

from __future__ import annotations

from random import Random

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
