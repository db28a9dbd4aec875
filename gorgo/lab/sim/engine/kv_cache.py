"""The KV pool of one engine: a radix cache of prefixes, and the private tokens of running requests.

Owns the accounting of cached, locked, private and reserved tokens, and eviction. `model` decides when to match, lock,
insert and release.

Theory of operation: the pool has `capacity_tokens`, and every token in it is of one of four kinds:

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

from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Self

from gorgo.core.prefix.residency import RadixNode, RadixTree
from gorgo.core.record import record
from gorgo.lab.sim.engine.kv_observer import KvObserver, TreeBlocks

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
        found = self.found_items(match.items)
        return match if found == match.items else self.match(key, at_most=found)

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
