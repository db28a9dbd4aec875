"""Own hashes of token blocks: a chained 64-bit hash per block, by which engines and prompts are compared.

Engines hash their blocks with seeds, algorithms and signs of their own, so their hashes are never compared. Both the
tokens of their events and those of a prompt are hashed here.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b

#: Bytes of a packed token id.
TOKEN_BYTES = 4
#: Bytes of a packed hash, little-endian.
HASH_BYTES = 8
_EMPTY = blake2b(digest_size=HASH_BYTES)


def token_bytes(token_ids: Iterable[int]) -> bytes:
    """Return token ids as packed 32-bit integers.

    Raise OverflowError for an id that does not fit, TypeError for another type.
    """
    packed = array("I", token_ids)
    assert packed.itemsize == TOKEN_BYTES
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def chain_root(adapter: str | None = None, cache_salt: str | None = None) -> int:
    """Return the hash before the first block: prompts under another adapter or salt share no block."""
    if adapter is None and cache_salt is None:
        return 0
    parts = [b"-" if part is None else b"+" + part.encode(errors="surrogatepass") for part in (adapter, cache_salt)]
    return _hashed(len(parts[0]).to_bytes(HASH_BYTES, "little") + b"".join(parts))


def next_hash(parent: int, tokens: bytes, extra: bytes = b"") -> int:
    """Return the hash of a block after `parent`; `extra` is its content beside the tokens."""
    return _hashed(parent.to_bytes(HASH_BYTES, "little") + tokens + extra)


def chain_hashes(tokens: bytes, *, block_tokens: int, root: int = 0) -> list[int]:
    """Return the hash of each full block of a prompt.

    >>> first, second = chain_hashes(token_bytes([1, 2, 3, 4, 5]), block_tokens=2)
    >>> second == next_hash(first, token_bytes([3, 4]))
    True
    """
    return unpacked(packed_chain(tokens, block_tokens=block_tokens, root=root))


def packed_chain(tokens: bytes, *, block_tokens: int, root: int = 0) -> bytes:
    """Return the hash of each full block of a prompt, packed."""
    size = block_tokens * TOKEN_BYTES
    digest = root.to_bytes(HASH_BYTES, "little")
    found: list[bytes] = []
    if excess := len(tokens) % size:
        tokens = tokens[:-excess]
    for (block,) in _block(size).iter_unpack(tokens):
        # A copy takes half as long as a new object with its options.
        hashing = _EMPTY.copy()
        hashing.update(digest + block)
        digest = hashing.digest()
        found.append(digest)
    return b"".join(found)


def unpacked(hashes: bytes) -> list[int]:
    """Return packed hashes as integers."""
    return list(struct.unpack(f"<{len(hashes) // HASH_BYTES}Q", hashes))


@lru_cache
def _block(size: int) -> struct.Struct:
    return struct.Struct(f"{size}s")


def _hashed(content: bytes) -> int:
    return int.from_bytes(blake2b(content, digest_size=HASH_BYTES).digest(), "little")
