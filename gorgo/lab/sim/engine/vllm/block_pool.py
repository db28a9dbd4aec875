"""The KV pool of a vLLM-like engine: blocks of a fixed size, their references, and the cache of full ones.

Owns allocation, reference counts and eviction. `model` decides when blocks are taken, stored and released.

Theory of operation. A block is full or not. A full one has content, the tokens up to its end, and can be found by any
request from the moment at which its tokens are scheduled; others are blank. Blocks of no request are free and still
found:

    blank   never used, or released before it was full: taken first
    cached  released last, from the end of its request to the start: taken in the order of release

Two requests may compute the same content at once: both blocks are cached, and the older one is found.

A unit is what the keys of requests can name: one block in a served engine, the blocks of one item in a trace replay,
where an item has more tokens than a block. Units are found and evicted whole; blank blocks are counted one by one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from math import lcm

from gorgo.lab.sim.engine.kv_observer import KvObserver

#: A product with a share may lie so much below the whole number that it stands for.
_ROUNDING = 1e-6


class CachedUnit:
    """One copy of some content and the number of requests that hold it."""

    __slots__ = ("content", "holders")

    def __init__(self, content: int) -> None:
        self.content = content
        self.holders = 1


class BlockPool:
    """Blocks and prefix cache of one engine.

    Parameters
    ----------
    capacity_tokens:
        Size of the pool; what is less than a block is not used.
    block_tokens:
        Size of a block.
    item_bytes, item_tokens:
        Bytes of one key item, and tokens that it stands for.
    hit_share, checkpoint_tokens, caching:
        As in `EngineProfile`; `caching` is its `prefix_cache`.

    Example
    -------
    >>> pool = BlockPool(capacity_tokens=64, block_tokens=16, item_bytes=1)
    >>> contents = pool.contents(b"a" * 40)
    >>> pool.take_blocks(3)
    >>> held = pool.store(contents)
    >>> pool.release(held, blank=1)
    >>> len(pool.find(pool.contents(b"a" * 20))), pool.free_blocks, pool.evictable_tokens
    (1, 4, 32)
    """

    def __init__(
        self,
        *,
        capacity_tokens: int,
        block_tokens: int = 16,
        item_bytes: int = 4,
        item_tokens: int = 1,
        hit_share: float = 1.0,
        checkpoint_tokens: int = 1,
        caching: bool = True,
    ) -> None:
        assert capacity_tokens >= block_tokens >= 1, "a pool has a block"
        self.block_tokens = block_tokens
        self.item_bytes = item_bytes
        self.item_tokens = item_tokens
        self.blocks = capacity_tokens // block_tokens
        self.unit_tokens = lcm(block_tokens, item_tokens)
        self.unit_blocks = self.unit_tokens // block_tokens
        self.evicted_tokens_total = 0
        self._unit_bytes = self.unit_tokens // item_tokens * item_bytes
        self._hit_share = hit_share
        self._checkpoint_tokens = checkpoint_tokens
        self._caching = caching
        #: Receives each change; `None`: not reported.
        self.observer: KvObserver | None = None
        self._blank = self.blocks
        #: Copies by content, the oldest first.
        self._copies: dict[int, list[CachedUnit]] = {}
        #: Cached units of no request, the first released first.
        self._free: OrderedDict[CachedUnit, None] = OrderedDict()

    @property
    def capacity_tokens(self) -> int:
        return self.blocks * self.block_tokens

    @property
    def event_tokens(self) -> int:
        """Return the tokens of a block as an observer sees them: those of a unit."""
        return self.unit_tokens

    @property
    def free_blocks(self) -> int:
        """Return the blocks that no request holds."""
        return self._blank + len(self._free) * self.unit_blocks

    @property
    def free_tokens(self) -> int:
        """Return the tokens of free blocks without content."""
        return self._blank * self.block_tokens

    @property
    def evictable_tokens(self) -> int:
        """Return the tokens of free blocks that are still found."""
        return len(self._free) * self.unit_tokens

    def blocks_of(self, tokens: int) -> int:
        """Return the blocks that so many tokens of one request take."""
        return -(-tokens // self.block_tokens)

    def report_to(self, observer: KvObserver) -> None:
        """Report each change from now on; nothing is cached yet."""
        assert not self._copies, "an observer knows the whole cache"
        self.observer = observer

    def contents(self, key: bytes) -> tuple[int, ...]:
        """The content of each whole unit of `key`: equal if all tokens up to its end are equal."""
        if not self._caching:
            return ()
        contents, content = [], 0
        for start in range(0, len(key) // self._unit_bytes * self._unit_bytes, self._unit_bytes):
            content = hash((content, key[start : start + self._unit_bytes]))
            contents.append(content)
        return tuple(contents)

    def has(self, content: int) -> bool:
        """Whether some block has this content."""
        return content in self._copies

    def find(self, contents: Sequence[int]) -> list[CachedUnit]:
        """The longest cached prefix as the engine finds it. Changes nothing."""
        found = []
        for content in contents:
            copies = self._copies.get(content)
            if copies is None:
                break
            found.append(copies[0])
        return found[: self.found_units(len(found))]

    def found_units(self, units: int) -> int:
        """Return how many of the first `units` are found where so many are cached."""
        if self._hit_share == 1.0 and self._checkpoint_tokens == 1:
            return units
        tokens = int(units * self.unit_tokens * self._hit_share + _ROUNDING)
        return (tokens - tokens % self._checkpoint_tokens) // self.unit_tokens

    def idle_blocks(self, units: Iterable[CachedUnit]) -> int:
        """Return the free blocks among `units`, which are free no more once a request holds them."""
        return sum(not unit.holders for unit in units) * self.unit_blocks

    def hold(self, units: Iterable[CachedUnit]) -> None:
        """Let one more request hold each."""
        for unit in units:
            if not unit.holders:
                del self._free[unit]
            unit.holders += 1

    def take_blocks(self, blocks: int) -> None:
        """Give blank blocks to a request; the caller saw that so many are free."""
        assert blocks <= self.free_blocks, "no more is taken than is free"
        while self._blank < blocks:
            unit, _ = self._free.popitem(last=False)
            self._forget(unit)
            self._blank += self.unit_blocks
            self.evicted_tokens_total += self.unit_tokens
        self._blank -= blocks

    def store(self, contents: Iterable[int]) -> list[CachedUnit]:
        """Give content to blank blocks that a request holds."""
        units = [CachedUnit(content) for content in contents]
        for unit in units:
            self._copies.setdefault(unit.content, []).append(unit)
        return units

    def report_stored(self, contents: Sequence[int], key: bytes, *, first: int) -> None:
        """Report the units of `key` from `first` to the end of `contents`."""
        assert self.observer is not None, "the caller saw one"
        items = key[first * self._unit_bytes : len(contents) * self._unit_bytes]
        self.observer.stored(contents[first:], contents[first - 1] if first else None, items)

    def release(self, units: Sequence[CachedUnit], *, blank: int) -> None:
        """Take back the units of one request, in order of its tokens, and its blank blocks."""
        for unit in reversed(units):
            unit.holders -= 1
            assert unit.holders >= 0, "each hold is released once"
            if not unit.holders:
                self._free[unit] = None
        self._blank += blank

    def flush(self) -> None:
        """Forget every content. Only an idle engine does this."""
        assert self.free_blocks == self.blocks, "nothing runs"
        self._free.clear()
        self._copies.clear()
        self._blank = self.blocks
        if self.observer is not None:
            self.observer.cleared()

    def check(self) -> None:
        """Assert every invariant."""
        units = [unit for copies in self._copies.values() for unit in copies]
        assert all(self._copies.values()), "content without a copy is forgotten"
        assert set(self._free) == {unit for unit in units if not unit.holders}
        assert 0 <= self._blank <= self.blocks - len(self._free) * self.unit_blocks

    def _forget(self, unit: CachedUnit) -> None:
        copies = self._copies[unit.content]
        copies.remove(unit)
        if not copies:
            del self._copies[unit.content]
        if self.observer is not None:
            self.observer.removed((unit.content,))
