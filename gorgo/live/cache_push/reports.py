"""Bodies of pushes: JSON, or packed hashes with the other fields in the query.

A snapshot of a million hashes takes 8 MB packed, which needs no parsing, and 20 MB as JSON, which would hold the event
loop for a quarter of a second. JSON is therefore for small pushes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gorgo.live.cache_push.source import MAX_HASHES, CachePush
from gorgo.live.http.errors import HttpError

#: Media type of packed hashes: unsigned 64-bit integers, little-endian.
PACKED = "application/octet-stream"
HASH_BYTES = 8
MAX_PACKED_BYTES = MAX_HASHES * HASH_BYTES
#: Version of the protocol.
VERSION = 1
#: Tokens of the largest block of an engine, with room.
MAX_BLOCK_TOKENS = 65_536
MAX_NAME = 256
_MAX_NUMBER = (1 << 63) - 1

#: Keys of a JSON body, and of the query beside a packed one but for the hashes.
FIELDS = ("version", "worker_id", "model", "block_tokens", "epoch", "sequence")
KEYS = (*FIELDS, "hashes")


def from_json(body: Mapping[str, Any]) -> CachePush:
    """Return the push of a JSON body. Raises `HttpError` (400) for the first wrong key."""
    for key in body:
        if key not in KEYS:
            raise _refused(f"{key[:60]!r}: unknown key; expected {', '.join(KEYS)}")
    return _push(body, _listed(body.get("hashes")))


def from_query(query: Iterable[tuple[str, str]]) -> CachePush:
    """Return the push that a query describes, without hashes. Raises `HttpError` (400)."""
    found: dict[str, Any] = {}
    for name, text in query:
        if name not in FIELDS or name in found:
            raise _refused(f"{name[:60]!r}: unknown or repeated; expected in the query {', '.join(FIELDS)}, each once")
        is_text = name in ("worker_id", "model")
        found[name] = text if is_text else _number(name, text)
    return _push(found, np.empty(0, dtype=np.uint64))


def unpacked(body: bytes | bytearray) -> NDArray[np.uint64]:
    """Return the hashes of a packed body. Raises `HttpError` (400)."""
    if len(body) % HASH_BYTES:
        raise _refused(f"the body has {len(body)} bytes; expected 8 per hash")
    return np.frombuffer(body, dtype="<u8").astype(np.uint64, copy=False)


def _push(found: Mapping[str, Any], hashes: NDArray[np.uint64]) -> CachePush:
    if found.get("version", VERSION) != VERSION:
        raise HttpError(400, "unsupported_version", f"version: expected {VERSION}, the only one")
    model = found.get("model")
    return CachePush(
        replica=_text("worker_id", found.get("worker_id"), "the name of the engine's replica"),
        model=None if model is None else _text("model", model, "the name of a model, or none for all of the replica"),
        block_tokens=_count("block_tokens", found.get("block_tokens"), 1, MAX_BLOCK_TOKENS),
        epoch=_count("epoch", found.get("epoch"), 0, _MAX_NUMBER),
        sequence=_count("sequence", found.get("sequence"), 0, _MAX_NUMBER),
        hashes=hashes,
    )


def _listed(value: object) -> NDArray[np.uint64]:
    if not isinstance(value, list) or not all(type(each) is int and 0 <= each < 1 << 64 for each in value):
        raise _refused("hashes: expected a list of whole numbers from 0 to 2^64 - 1")
    return np.array(value, dtype=np.uint64)


def _text(name: str, value: object, expected: str) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME or not value.isprintable():
        raise _refused(f"{name}: expected {expected}")
    return value


def _count(name: str, value: object, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise _refused(f"{name}: expected a whole number from {low} to {high}")
    return value


def _number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 19):
        raise _refused(f"{name}: expected a whole number")
    return int(text)


def _refused(message: str) -> HttpError:
    return HttpError(400, "invalid_request", message)
