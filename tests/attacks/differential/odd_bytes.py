"""Seeded faults in bytes, random pieces of them, and the smallest bytes that still fail.

Faults are small, so that most of an item stays well formed: a reader that refuses everything shows nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

#: What two readers may take for different things.
SPLINTERS = (
    b"\r\n", b"\n", b"\r", b"\r\r\n", b"\r\n\r\n", b"\n\n", b"\r\n ", b"\r\n\t", b" ", b"\t", b"\0", b"\x0b", b"\x0c",
    b"\x1f", b"\x7f", b"\x80", b"\xff", b"\x85", b"\xa0", b":", b";", b",", b"=", b'"', b"0", b"00", b"+", b"-", b"_",
    b"0x", b"a", b"A", b"f", b"chunked", b"0\r\n\r\n", b"5\r\nhello\r\n", b"content-length: 5\r\n",
    b"transfer-encoding: chunked\r\n", b"GET / HTTP/1.1\r\nhost: g\r\n\r\n", b"HTTP/1.1", b"9" * 20, b"f" * 16,
)  # fmt: skip
_FAULTS_MAX = 3
_CUT_BYTES_MAX = 8
_BYTE_BY_BYTE_MAX = 300


def spoiled(chance: Random, text: bytes) -> bytes:
    """Return the text with one to three small faults."""
    for _ in range(chance.randint(1, _FAULTS_MAX)):
        at = chance.randrange(len(text) + 1)
        to = min(len(text), at + chance.randint(1, _CUT_BYTES_MAX))
        match chance.randrange(6):
            case 0 | 1:
                text = text[:at] + chance.choice(SPLINTERS) + text[at:]
            case 2:
                text = text[:at] + chance.choice(SPLINTERS) + text[to:]
            case 3:
                text = text[:at] + text[to:]
            case 4:
                text = text[:at] + bytes([chance.randrange(256)]) + text[at + 1 :]
            case _:
                text = text[:to] + text[at:to] + text[to:]
    return text


def pieces(chance: Random, text: bytes) -> list[bytes]:
    """Return the text cut at random places: in one piece, in a few, or each byte on its own."""
    kind = chance.random()
    if kind < 0.3 or not text:
        return [text]
    if kind < 0.35 and len(text) <= _BYTE_BY_BYTE_MAX:
        return [text[at : at + 1] for at in range(len(text))]
    cuts = sorted({chance.randrange(1, len(text) + 1) for _ in range(chance.randint(1, 6))} | {len(text)})
    return [text[a:b] for a, b in zip([0, *cuts], cuts, strict=False)]


def minimised(parts: Sequence[bytes], fails: Callable[[Sequence[bytes]], bool]) -> list[bytes]:
    """Return fewer bytes in fewer pieces that still fail.

    >>> minimised([b"abxcd", b"efyg"], lambda parts: b"x" in b"".join(parts) and b"y" in b"".join(parts))
    [b'xy']
    """
    found = list(parts)
    while len(found) > 1:
        joined = next(
            (new for at in range(len(found) - 1) if fails(new := _joined(found, at))),
            None,
        )
        if joined is None:
            break
        found = joined
    size = max(1, sum(map(len, found)) // 2)
    while size:
        smaller = next((new for new in _without(found, size) if fails(new)), None)
        if smaller is None:
            size //= 2
        else:
            found = smaller
    return found


def _joined(parts: Sequence[bytes], at: int) -> list[bytes]:
    return [*parts[:at], parts[at] + parts[at + 1], *parts[at + 2 :]]


def _without(parts: Sequence[bytes], size: int) -> list[list[bytes]]:
    """Return the pieces without each run of so many bytes."""
    return [
        [one for one in (*parts[:place], part[:at] + part[at + size :], *parts[place + 1 :]) if one]
        for place, part in enumerate(parts)
        for at in range(0, len(part) - size + 1, size)
    ]
