"""The KV pools of engines: SGLang's radix cache of prefixes (`KvCache`), and vLLM's blocks (`BlockPool`).

Owns the accounting of cached, locked, private and reserved tokens and of blocks, eviction, and what an observer of a
cache sees. `model` and `vllm` decide when to match, lock, insert and release.

Theory of operation of `KvCache`: the pool has `capacity_tokens`, and every token in it is of one of four kinds:

    locked     in the tree, on the path of a running request: never evicted
    evictable  in the tree, on no path: evicted from the leaves up, least recently used first, whole nodes
    private    computed for a running request and not in the tree (prompt in prefill, generated tokens)
    free       the rest

`promised` tokens are still free or evictable, but a running request will need them. Admission promises everything that
a request can need, so `allocate` always succeeds: free + evictable >= promised is an invariant.

Some engines find only part of a cached prefix: those of hybrid models, and those with coarse pages or checkpoints of a
recurrent state. `find` is the match as such an engine uses it. The part that is not found stays cached, is computed
again by each request, and is freed as a duplicate when that request inserts its prompt.

An item is the unit of the keys: one token of four bytes in a served engine, a block of many tokens in a trace replay.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from math import lcm
from typing import Protocol, Self

from gorgo.core.prefix.residency import RadixNode, RadixTree
from gorgo.core.record import record

# The observer of an engine's KV cache: which blocks it stores and removes, as real engines publish it.
#
# Owns the interface and the blocks of a radix cache. Publishers of events and reporters of pushes implement it; a cache
# without an observer computes none of it.
#
# A block is named by a chained hash, as in a real engine: valid within one cache and one process, and signed. A cache
# of the SGLang kind stores the blocks of a prompt after its whole prefill, one of the vLLM kind each block as soon as
# its last token is scheduled. The latter can have several copies of a block, each of which is stored and removed once.


class KvObserver(Protocol):
    """Receiver of the changes of one cache, in their order. It must not call the cache."""

    def stored(self, hashes: Sequence[int], parent: int | None, items: bytes) -> None:
        """Store consecutive blocks behind `parent`, `None` at the start of a prompt; `items` are their key items."""

    def removed(self, hashes: Sequence[int]) -> None:
        """Remove one copy of each of these blocks."""

    def cleared(self) -> None:
        """Empty the cache."""


class KvObservers(KvObserver):
    """Several observers of one cache, each with every change.

    Parameters
    ----------
    observers:
        In the order in which they receive a change.
    """

    def __init__(self, observers: Sequence[KvObserver]) -> None:
        self._observers = tuple(observers)

    def stored(self, hashes: Sequence[int], parent: int | None, items: bytes) -> None:
        for observer in self._observers:
            observer.stored(hashes, parent, items)

    def removed(self, hashes: Sequence[int]) -> None:
        for observer in self._observers:
            observer.removed(hashes)

    def cleared(self) -> None:
        for observer in self._observers:
            observer.cleared()


class TreeBlocks:
    """The blocks of a cache whose prefixes are a tree: a block is cached while its last item is in the tree.

    Parameters
    ----------
    observer:
        Receives them.
    block_bytes:
        Bytes of a block's items.

    Example
    -------
    >>> class Printed:
    ...     def stored(self, hashes, parent, items):
    ...         print(len(hashes), parent is None, items)
    ...     def removed(self, hashes):
    ...         print(len(hashes))
    >>> blocks = TreeBlocks(Printed(), block_bytes=2)
    >>> blocks.report_stored(b"abcde", start=0)
    2 True b'abcd'
    >>> blocks.report_stored(b"abcdef", start=5)  # The block began with an item that was cached before.
    1 False b'ef'
    """

    def __init__(self, observer: KvObserver, *, block_bytes: int) -> None:
        self._observer = observer
        self._block_bytes = block_bytes

    def report_stored(self, key: bytes, *, start: int) -> None:
        """Report what `key` adds behind its first `start` bytes."""
        first, hashes = start // self._block_bytes, self._hashes(key)
        if added := hashes[first:]:
            parent = hashes[first - 1] if first else None
            items = key[first * self._block_bytes : len(hashes) * self._block_bytes]
            self._observer.stored(added, parent, items)

    def report_removed(self, key: bytes, *, start: int) -> None:
        """Report that `key` is cut to its first `start` bytes."""
        if removed := self._hashes(key)[start // self._block_bytes :]:
            self._observer.removed(removed)

    def report_cleared(self) -> None:
        """Report an empty cache."""
        self._observer.cleared()

    def _hashes(self, key: bytes) -> list[int]:
        """Return the hash of each whole block."""
        size, parent, hashes = self._block_bytes, 0, []
        for end in range(size, len(key) + 1, size):
            parent = hash((parent, key[end - size : end]))
            hashes.append(parent)
        return hashes


#: A product with a share may lie so much below the whole number that it stands for.
_ROUNDING = 1e-6


class CacheNode(RadixNode):
    """A part of a cached prefix: its locks, its last use, and whether it is in the eviction heap."""

    __slots__ = ("last_used", "locks", "queued")

    def __init__(self, edge: bytes, end: int, parent: Self | None) -> None:
        super().__init__(edge, end, parent)
        self.locks = 0
        self.last_used = 0
        self.queued = False

    def inherit(self, lower: Self) -> None:
        self.locks = lower.locks
        self.last_used = lower.last_used


@record
class Match:
    """The cached prefix of a key. Valid until the cache changes.

    `items` match, over the nodes of `path` (the last one perhaps in part); `evictable_tokens` of them are on no
    path yet and stop being evictable when this match is locked.
    """

    path: list[CacheNode]
    items: int
    evictable_tokens: int


class KvCache:
    """Radix cache and pool accounting of one engine.

    Parameters
    ----------
    capacity_tokens:
        Size of the pool.
    item_bytes, item_tokens:
        Bytes of one key item, and tokens that it stands for.
    hit_share, checkpoint_tokens, block_tokens:
        As in `EngineProfile`; an observer sees blocks of an item at least.

    Example
    -------
    >>> cache = KvCache(capacity_tokens=100, item_bytes=1)
    >>> handle = cache.lock(cache.match(b"abcd"))  # nothing cached yet
    >>> cache.reserve(6)
    >>> cache.allocate(4)
    >>> handle, fresh = cache.insert(b"abcd", handle)
    >>> fresh, cache.cached_tokens, cache.private_tokens, cache.reserved_tokens
    (4, 4, 0, 2)
    >>> cache.match(b"abcz").items
    3
    """

    def __init__(
        self,
        *,
        capacity_tokens: int,
        item_bytes: int = 4,
        item_tokens: int = 1,
        hit_share: float = 1.0,
        checkpoint_tokens: int = 1,
        block_tokens: int = 1,
    ) -> None:
        assert capacity_tokens > 0, "a pool has room"
        assert 0.0 <= hit_share <= 1.0, "a share is between none and all"
        assert checkpoint_tokens >= 1, "a checkpoint covers a token at least"
        self.capacity_tokens = capacity_tokens
        self._hit_share, self._checkpoint_tokens = hit_share, checkpoint_tokens
        self.item_bytes, self.item_tokens = item_bytes, item_tokens
        self.event_tokens = max(block_tokens // item_tokens, 1) * item_tokens
        self._blocks: TreeBlocks | None = None
        self.cached_tokens = self.locked_tokens = 0
        self.private_tokens = self.reserved_tokens = 0
        self.evicted_tokens_total = 0
        self._tree: RadixTree[CacheNode] = RadixTree(CacheNode, item_bytes=item_bytes)
        self._heap: list[tuple[int, int, CacheNode]] = []
        self._clock = self._pushes = 0

    @property
    def root(self) -> CacheNode:
        """The handle of a request that matched nothing."""
        return self._tree.root

    @property
    def evictable_tokens(self) -> int:
        return self.cached_tokens - self.locked_tokens

    @property
    def free_tokens(self) -> int:
        return self.capacity_tokens - self.cached_tokens - self.private_tokens

    @property
    def available_tokens(self) -> int:
        """Return the tokens that a new request can reserve before its match is locked."""
        return self.free_tokens + self.evictable_tokens - self.reserved_tokens

    def report_to(self, observer: KvObserver) -> None:
        """Report each change from now on; the cache is empty."""
        assert not self.cached_tokens, "an observer knows the whole cache"
        self._blocks = TreeBlocks(observer, block_bytes=self.event_tokens // self.item_tokens * self.item_bytes)

    def match(self, key: bytes, *, at_most: int | None = None) -> Match:
        """The longest cached prefix of `key`, `at_most` so many items. Changes nothing."""
        if at_most is not None:
            key = key[: at_most * self.item_bytes]
        path, items = self._tree.match_path(key)
        unlocked = start = 0
        for node in path:
            if not node.locks:
                unlocked += min(node.end, items) - start
            start = node.end
        return Match(path, items, unlocked * self.item_tokens)

    def find(self, key: bytes, *, at_most: int | None = None) -> Match:
        """The part of `match` that the engine finds. Changes nothing."""
        match = self.match(key, at_most=at_most)
        items = self.found_items(match.items)
        return match if items == match.items else self.match(key, at_most=items)

    def found_items(self, items: int) -> int:
        """Return how many of the first `items` are found where so many are cached."""
        if self._hit_share == 1.0 and self._checkpoint_tokens == 1:
            return items
        tokens = int(items * self.item_tokens * self._hit_share + _ROUNDING)
        return (tokens - tokens % self._checkpoint_tokens) // self.item_tokens

    def lock(self, match: Match) -> CacheNode:
        """Protect the matched prefix and mark it used; the answer is the handle to `unlock` it by."""
        node = match.path[-1] if match.path else self.root
        if match.items < node.end:
            node = self._tree.split(node, match.items)
        self._lock_path(node, self.root)
        return node

    def unlock(self, handle: CacheNode) -> None:
        """Give up one lock of the whole path to `handle`."""
        node = handle
        while (parent := node.parent) is not None:
            node.locks -= 1
            assert node.locks >= 0, "each lock is given up once"
            if not node.locks:
                self.locked_tokens -= self._tokens(node)
                self._offer(node)
            node = parent

    def reserve(self, tokens: int) -> None:
        """Set `tokens` aside for a request; the caller saw that `available_tokens` allows it."""
        assert 0 <= tokens <= self.available_tokens, "no more is promised than can be had"
        self.reserved_tokens += tokens

    def allocate(self, tokens: int) -> None:
        """Turn promised tokens into private ones, evicting as needed."""
        self.reserved_tokens -= tokens
        assert self.reserved_tokens >= 0, "only what was promised is allocated"
        private = self.private_tokens + tokens
        exceeding = self.cached_tokens + private - self.capacity_tokens
        if exceeding > 0:
            self._evict(exceeding)
        self.private_tokens = private

    def release(self, *, private: int, promised: int) -> None:
        """Release private tokens of a request and the rest of its reservation."""
        self.private_tokens -= private
        self.reserved_tokens -= promised
        assert self.private_tokens >= 0, "private tokens are given back once"
        assert self.reserved_tokens >= 0, "promises are given back once"

    def insert(self, key: bytes, handle: CacheNode) -> tuple[CacheNode, int]:
        """Move the tokens of `key` behind `handle` (its locked prefix) from private to cached.

        Returns the handle of the whole key, locked in place of the old one, and how many tokens were new. Those that
        a sibling had inserted meanwhile are duplicates and become free.
        """
        path, matched = self._tree.match_below(handle, key)
        node = path[-1] if path else handle
        if matched < node.end:
            node = self._tree.split(node, matched)
        self._lock_path(node, handle)
        items = len(key) // self.item_bytes
        fresh = (items - matched) * self.item_tokens
        self.private_tokens -= (items - handle.end) * self.item_tokens
        assert self.private_tokens >= 0, "what is inserted was private"
        self.cached_tokens += fresh
        if not fresh:
            return node, 0
        start, end = matched * self.item_bytes, items * self.item_bytes
        leaf = self._tree.append(node, key[start:end])
        leaf.last_used, leaf.locks = self._clock, 1
        self.locked_tokens += fresh
        if self._blocks is not None:
            self._blocks.report_stored(key[:end], start=start)
        return leaf, fresh

    def flush(self) -> None:
        """Forget every prefix. Only an idle engine does this."""
        assert self.locked_tokens == self.private_tokens == 0, "nothing runs"
        self._tree = RadixTree(CacheNode, item_bytes=self.item_bytes)
        self._heap.clear()
        self.cached_tokens = 0
        if self._blocks is not None:
            self._blocks.report_cleared()

    def nodes(self) -> Iterator[CacheNode]:
        """Every node but the root, parents first."""
        return self._tree.descendants()

    def check(self) -> None:
        """Assert every invariant; visits the whole tree."""
        nodes = list(self.nodes())
        assert self.cached_tokens == sum(map(self._tokens, nodes))
        assert self.locked_tokens == sum(self._tokens(node) for node in nodes if node.locks)
        for node in nodes:
            assert node.parent is not None
            assert node.end - len(node.edge) // self.item_bytes == node.parent.end
            assert node.parent is self.root or node.parent.locks >= node.locks, "a lock covers the path"
            assert node.locks or node.children or node.queued, "what can be evicted is queued"
        assert min(self.free_tokens, self.evictable_tokens, self.private_tokens, self.reserved_tokens) >= 0
        assert self.free_tokens + self.evictable_tokens >= self.reserved_tokens
        assert len(self._heap) == sum(node.queued for node in nodes), "the heap holds a node once at most"

    def _tokens(self, node: CacheNode) -> int:
        return len(node.edge) // self.item_bytes * self.item_tokens

    def _lock_path(self, node: CacheNode, locked: CacheNode) -> None:
        """Mark the path to `node` used; lock it from below `locked` on, whose lock becomes that of `node`."""
        self._clock = used = self._clock + 1
        above, each = locked.end, node
        while (parent := each.parent) is not None:
            each.last_used = used
            if each.end > above:
                if not each.locks:
                    self.locked_tokens += self._tokens(each)
                each.locks += 1
            each = parent

    def _offer(self, node: CacheNode) -> None:
        """Put an evictable leaf into the heap, once."""
        if not (node.queued or node.locks or node.children):
            node.queued = True
            self._pushes += 1
            heappush(self._heap, (node.last_used, self._pushes, node))

    def _evict(self, tokens: int) -> None:
        """Remove least recently used leaves until `tokens` are free again."""
        goal = self.evicted_tokens_total + tokens
        while self.evicted_tokens_total < goal:
            last_used, _, node = heappop(self._heap)
            node.queued = False
            if node.last_used != last_used:
                self._offer(node)
            elif not (node.locks or node.children):
                self._remove(node)

    def _remove(self, node: CacheNode) -> None:
        parent = node.parent
        assert parent is not None, "the root is never queued"
        if self._blocks is not None:
            self._blocks.report_removed(node.path_items(), start=parent.end * self.item_bytes)
        self._tree.remove(node)
        self.cached_tokens -= self._tokens(node)
        self.evicted_tokens_total += self._tokens(node)
        if parent is not self.root:
            self._offer(parent)


# The KV pool of a vLLM-like engine: blocks of a fixed size, their references, and the cache of full ones.
#
# Owns allocation, reference counts and eviction. `vllm` decides when blocks are taken, stored and released.
#
# Theory of operation. A block is full or not. A full one has content, the tokens up to its end, and can be found by any
# request from the moment at which its tokens are scheduled; others are blank. Blocks of no request are free and still
# found:
#
#     blank   never used, or released before it was full: taken first
#     cached  released last, from the end of its request to the start: taken in the order of release
#
# Two requests may compute the same content at once: both blocks are cached, and the older one is found.
#
# A unit is what the keys of requests can name: one block in a served engine, the blocks of one item in a trace replay,
# where an item has more tokens than a block. Units are found and evicted whole; blank blocks are counted one by one.


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
        units = []
        for content in contents:
            copies = self._copies.get(content)
            if copies is None:
                break
            units.append(copies[0])
        return units[: self.found_units(len(units))]

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
