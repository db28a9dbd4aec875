"""One cache of an engine as its events describe it: a replica's rank, tier and KV cache group.

Owns the translation of the engine's hashes to own ones, the number of copies, and the own hashes of token blocks. See
`kv_index` for the sources of all replicas.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from itertools import islice, repeat

from gorgo.core.messages.kv_events import KvTier

#: Parts of a table of blocks by own hash. A dict that grows copies all it has, in 50 ms at 700,000 blocks; each part
#: grows by itself.
PARTS = 256
#: The highest bits of an own hash name its part: a dict places a key by the lowest, which are equal in no part.
PART_SHIFT = 56


class TierBlocks:
    """The blocks of one tier: own hash to a bit mask over slots.

    Several caches of a replica can have one block (ranks, groups). The mask has one bit for them, `more` the number of
    others.
    """

    def __init__(self) -> None:
        #: By the highest bits of the own hash.
        self.parts: list[dict[int, int]] = [{} for _ in range(PARTS)]
        #: (own hash, bit of the slot) -> caches of that replica with the block, less one.
        self.more: dict[tuple[int, int], int] = {}

    @property
    def masks(self) -> dict[int, int]:
        """Return all blocks with their masks; visits every one."""
        return {own_hash: mask for part in self.parts for own_hash, mask in part.items()}

    def masks_of(self, hashes: Iterable[int]) -> list[int]:
        """Return the mask of each block, 0 for one on no replica."""
        parts = self.parts
        return [parts[own_hash >> PART_SHIFT].get(own_hash, 0) for own_hash in hashes]

    def add(self, own_hash: int, bit: int) -> None:
        masks = self.parts[own_hash >> PART_SHIFT]
        mask = masks.get(own_hash)
        if mask is None:
            masks[own_hash] = bit
        elif mask & bit:
            self.more[own_hash, bit] = self.more.get((own_hash, bit), 0) + 1
        else:
            masks[own_hash] = mask | bit

    def remove(self, own_hash: int, bit: int) -> None:
        more = self.more.get((own_hash, bit)) if self.more else None
        if more is not None:
            if more > 1:
                self.more[own_hash, bit] = more - 1
            else:
                del self.more[own_hash, bit]
            return
        masks = self.parts[own_hash >> PART_SHIFT]
        mask = masks[own_hash] ^ bit
        if mask:
            masks[own_hash] = mask
        else:
            del masks[own_hash]


@dataclass(slots=True)
class KvSource:
    """The blocks of one cache, by the engine's hash, oldest first.

    Parameters
    ----------
    bit:
        Mask of the replica's slot.
    rank, tier, group:
        Which of the replica's caches.
    blocks:
        Blocks of the tier on all replicas.
    """

    bit: int
    rank: int
    tier: KvTier
    group: int
    blocks: TierBlocks
    #: Engine's hash -> own hash.
    own: dict[int, int] = field(default_factory=dict)
    #: Engine's hash -> copies beyond the first.
    copies: dict[int, int] = field(default_factory=dict)

    def store(self, engine_hashes: Sequence[int], owned: Sequence[int]) -> int:
        """Store one copy of each block; return the blocks added. A hash of another block replaces that one."""
        own_of, parts, bit = self.own, self.blocks.parts, self.bit
        before = len(own_of)
        if self._add_unknown(engine_hashes, owned):
            # As `blocks.add`, without a call for the most frequent cases.
            for own_hash in owned:
                masks = parts[own_hash >> PART_SHIFT]
                mask = masks.get(own_hash)
                if mask is None:
                    masks[own_hash] = bit
                elif mask & bit:
                    self.blocks.add(own_hash, bit)
                else:
                    masks[own_hash] = mask | bit
            return len(owned)
        for engine_hash, own_hash in zip(engine_hashes, owned, strict=True):
            previous = own_of.get(engine_hash)
            if previous is not None:
                if previous == own_hash:
                    self.copies[engine_hash] = self.copies.get(engine_hash, 0) + 1
                    continue
                self._forget(engine_hash)
            own_of[engine_hash] = own_hash
            self.blocks.add(own_hash, bit)
        return len(own_of) - before

    def _add_unknown(self, engine_hashes: Sequence[int], owned: Sequence[int]) -> bool:
        """Add blocks if all of them are unknown and none comes twice; else change nothing, and return False."""
        own_of = self.own
        if not own_of.keys().isdisjoint(engine_hashes):
            return False
        expected = len(own_of) + len(owned)
        own_of.update(zip(engine_hashes, owned, strict=True))
        if len(own_of) == expected:
            return True
        for engine_hash in set(engine_hashes):
            del own_of[engine_hash]
        return False

    def evict(self, engine_hashes: Sequence[int]) -> int:
        """Remove one copy of each block; return how many hashes are unknown."""
        tier, bit, copies, unknown = self.blocks, self.bit, self.copies, 0
        if copies:
            engine_hashes = [each for each in engine_hashes if each not in copies or not self._evict_copy(each)]
        parts, more = tier.parts, tier.more
        for own_hash in map(self.own.pop, engine_hashes, repeat(None)):
            if own_hash is None:
                unknown += 1
            elif more:
                tier.remove(own_hash, bit)
            else:
                # As `TierBlocks.remove`, without a call for the most frequent case.
                masks = parts[own_hash >> PART_SHIFT]
                mask = masks[own_hash]
                if mask == bit:
                    del masks[own_hash]
                else:
                    masks[own_hash] = mask ^ bit
        return unknown

    def drop_oldest(self, count: int) -> int:
        """Remove the blocks stored first with all their copies; return how many."""
        oldest = list(islice(self.own, count))
        for engine_hash in oldest:
            self._forget(engine_hash)
        return len(oldest)

    def drop_newest(self, count: int) -> int:
        """Remove up to `count` blocks with all their copies, the last stored first; return how many."""
        count = min(count, len(self.own))
        # An iterator would visit all that were dropped before.
        for engine_hash, own_hash in [self.own.popitem() for _ in range(count)]:
            self.blocks.remove(own_hash, self.bit)
            self.copies.pop(engine_hash, None)
        return count

    def owned(self) -> Iterator[int]:
        """Yield the own hash of each block."""
        return iter(self.own.values())

    def _evict_copy(self, engine_hash: int) -> bool:
        copies = self.copies[engine_hash]
        if copies > 1:
            self.copies[engine_hash] = copies - 1
        else:
            del self.copies[engine_hash]
        return True

    def _forget(self, engine_hash: int) -> None:
        self.blocks.remove(self.own.pop(engine_hash), self.bit)
        self.copies.pop(engine_hash, None)


# Own hashes of token blocks: a chained 64-bit hash per block, by which engines and prompts are compared.
#
# Engines hash their blocks with seeds, algorithms and signs of their own, so their hashes are never compared. Both the
# tokens of their events and those of a prompt are hashed here.


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
    digests: list[bytes] = []
    if excess := len(tokens) % size:
        tokens = tokens[:-excess]
    for (block,) in _block(size).iter_unpack(tokens):
        # A copy takes half as long as a new object with its options.
        hashing = _EMPTY.copy()
        hashing.update(digest + block)
        digest = hashing.digest()
        digests.append(digest)
    return b"".join(digests)


def unpacked(hashes: bytes) -> list[int]:
    """Return packed hashes as integers."""
    return list(struct.unpack(f"<{len(hashes) // HASH_BYTES}Q", hashes))


@lru_cache
def _block(size: int) -> struct.Struct:
    return struct.Struct(f"{size}s")


def _hashed(content: bytes) -> int:
    return int.from_bytes(blake2b(content, digest_size=HASH_BYTES).digest(), "little")
