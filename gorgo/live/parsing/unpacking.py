"""A compressed body of a request: which content codings are read, and its bytes unpacked within bounds.

Owns the 415 of a coding that cannot be read here, the 400 of a body that is not what its head says, and the 413 of one
that grows too much. Leaves to `workers` where the work is done, and to the shells that the replica gets the body
without its coding.

Theory of operation. gzip and deflate are always read; zstd and br where a library for them is installed (the extra
`compression`; zstd is part of Python 3.14). Each decompressor is asked for a piece at a time, so that no body is larger
here than its bound by more than a piece.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from importlib import import_module
from typing import Any

from gorgo.live.http.errors import HttpError
from gorgo.live.http.headers import Header

#: Unpacked at once, and at most what is unpacked in the event loop: half a millisecond of gzip.
PIECE_BYTES = 192 * 1024
#: Growth of a body beyond `FREE_BYTES`. Prompts of many repetitions grow by a hundred, a bomb of gzip by a thousand.
MAX_RATIO = 256
#: A body up to here may grow without bound, since it is small.
FREE_BYTES = 1024 * 1024
#: Members of a gzip body, or frames of a zstd body: clients send one, and an empty one costs as much as a request.
MAX_MEMBERS = 64
#: Memory that a zstd body may ask for, as a power of two: 8 MiB, the most that RFC 9659 lets a sender of HTTP ask for.
ZSTD_WINDOW_LOG = 23
#: Read at once of the compressed body: a decompressor copies what it has not used yet.
_READ_BYTES = 64 * 1024
_ALIASES = {"x-gzip": "gzip"}


def coding_of(headers: Iterable[Header]) -> str | None:
    """Return the content coding of a request's body, `None` for a plain one. Raises `HttpError` (415).

    >>> coding_of([(b"content-encoding", b"GZIP")])
    'gzip'
    """
    said = b",".join(value for name, value in headers if name == b"content-encoding").decode("latin-1").lower()
    codings = [coding for part in said.split(",") if (coding := part.strip()) not in ("", "identity")]
    if not codings:
        return None
    coding = _ALIASES.get(codings[0], codings[0])
    if len(codings) == 1 and coding in _readers():
        return coding
    names = ", ".join(_readers())
    message = f"expected a body without content-encoding, or with one of: {names}"
    raise HttpError(415, "unsupported_media_type", message, headers=((b"accept-encoding", names.encode()),))


def unpack_quick(coding: str, body: bytes, *, limit: int) -> bytes | None:
    """Return the unpacked body; `None` for one of more than `PIECE_BYTES`, which another process should unpack.

    Raises `HttpError` as `unpack`.
    """
    if len(body) > PIECE_BYTES:
        return None
    parts: list[bytes] = []
    size = 0
    for piece in unpack(coding, body, limit=limit):
        parts.append(piece)
        size += len(piece)
        if size > PIECE_BYTES:
            return None
    return b"".join(parts)


def unpack(coding: str, body: bytes, *, limit: int) -> Iterator[bytes]:
    """Yield the body unpacked, in pieces of about `PIECE_BYTES` and `limit` bytes in all.

    Raises `HttpError`: 400 for bytes that are not of this coding or end too early, 413 for more than the bounds admit.
    """
    grown = max(FREE_BYTES, MAX_RATIO * len(body))
    size = 0
    try:
        for piece in _readers()[coding](body):
            size += len(piece)
            if size > limit:
                raise HttpError(413, "request_too_large", f"the unpacked body is larger than {limit} bytes")
            if size > grown:
                message = f"the unpacked body is more than {MAX_RATIO} times as large as the one that was sent"
                raise HttpError(413, "request_too_large", message)
            if piece:
                yield piece
    except HttpError:
        raise
    except Exception:  # noqa: BLE001 - each library has an error of its own, and all mean the same
        message = f"the body is not whole {coding}, which its content-encoding says"
        raise HttpError(400, "invalid_request", message) from None


_Reader = Callable[[bytes], Iterator[bytes]]


@lru_cache(1)
def _readers() -> dict[str, _Reader]:
    """Return what yields the pieces of a body, by coding. Libraries are imported with the first compressed body."""
    readers: dict[str, _Reader] = {"gzip": _gzip, "deflate": _deflate}
    for coding, find in (("zstd", _find_zstd), ("br", _find_brotli)):
        reader = find()
        if reader is not None:
            readers[coding] = reader
    return readers


def _find_zstd() -> _Reader | None:
    for name in ("compression.zstd", "backports.zstd"):
        try:
            library = import_module(name)
        except ImportError:
            continue
        options = {library.DecompressionParameter.window_log_max: ZSTD_WINDOW_LOG}
        return partial(_zstd, new=partial(library.ZstdDecompressor, options=options))
    return None


def _find_brotli() -> _Reader | None:
    """Return the reader of br, where the library can be told how much to unpack at once: brotli 1.2 and newer."""
    try:
        library = import_module("brotli")
        library.Decompressor().process(b"", output_buffer_limit=1)
    except (ImportError, AttributeError, TypeError):
        return None
    return lambda body: _brotli(body, library.Decompressor())


def _reads(body: bytes) -> Iterator[bytes]:
    for start in range(0, len(body), _READ_BYTES):
        yield body[start : start + _READ_BYTES]


def _gzip(body: bytes) -> Iterator[bytes]:
    return _zlib(body, 16 + zlib.MAX_WBITS)


def _deflate(body: bytes) -> Iterator[bytes]:
    """Read deflate within zlib's frame, as RFC 9110 has it, or without, as some clients send it."""
    framed = len(body) > 1 and body[0] & 15 == 8 and (body[0] << 8 | body[1]) % 31 == 0
    return _zlib(body, zlib.MAX_WBITS if framed else -zlib.MAX_WBITS)


def _zlib(body: bytes, wbits: int) -> Iterator[bytes]:
    reader = zlib.decompressobj(wbits)
    members = 1
    for data in _reads(body):
        while data:
            if reader.eof:
                members = _next_member(members)
                reader = zlib.decompressobj(wbits)
            yield reader.decompress(data, PIECE_BYTES)
            data = reader.unused_data if reader.eof else reader.unconsumed_tail
    while not reader.eof:
        # All has been read, and a piece was full.
        piece = reader.decompress(b"", PIECE_BYTES)
        if not piece:
            raise EOFError
        yield piece


def _zstd(body: bytes, new: Callable[[], Any]) -> Iterator[bytes]:
    reader = new()
    members = 1
    for data in _reads(body):
        while data or not (reader.eof or reader.needs_input):
            if reader.eof:
                members = _next_member(members)
                reader = new()
            yield reader.decompress(data, PIECE_BYTES)
            data = reader.unused_data if reader.eof else b""
    if not reader.eof:
        raise EOFError


def _brotli(body: bytes, reader: Any) -> Iterator[bytes]:
    for data in _reads(body):
        piece = reader.process(data, output_buffer_limit=PIECE_BYTES)
        # What it retains it gives without more input, whatever `can_accept_more_data` says.
        while piece or not (reader.is_finished() or reader.can_accept_more_data()):
            yield piece
            piece = reader.process(b"", output_buffer_limit=PIECE_BYTES)
    if not reader.is_finished():
        raise EOFError


def _next_member(members: int) -> int:
    if members >= MAX_MEMBERS:
        raise ValueError(f"more than {MAX_MEMBERS} members")
    return members + 1
