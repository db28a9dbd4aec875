from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gorgo.lab.sim.engine.kv_cache import CacheNode, KvCache


def store(cache: KvCache, key: bytes) -> None:
    """Cache a key as a request would that ends at once."""
    match = cache.match(key)
    needed = len(key) - match.items
    handle = cache.lock(match)
    cache.reserve(needed)
    cache.allocate(needed)
    handle, _ = cache.insert(key, handle)
    cache.unlock(handle)


def cached(cache: KvCache, key: bytes) -> int:
    return cache.match(key).items


def test_the_least_recently_used_leaf_goes_first() -> None:
    cache = KvCache(capacity_tokens=9, item_bytes=1)
    for key in (b"aaa", b"bbb", b"ccc", b"aaa"):
        store(cache, key)
    store(cache, b"ddd")
    assert [cached(cache, key) for key in (b"aaa", b"bbb", b"ccc", b"ddd")] == [3, 0, 3, 3]


def test_a_shared_prefix_outlives_its_branches() -> None:
    cache = KvCache(capacity_tokens=9, item_bytes=1)
    store(cache, b"xxxaaa")
    store(cache, b"xxxbbb")
    store(cache, b"ccc")
    assert [cached(cache, key) for key in (b"xxxaaa", b"xxxbbb", b"ccc")] == [3, 6, 3]
    assert cache.evicted_tokens_total == 3


def test_an_engine_finds_its_share_of_a_prefix_in_whole_items() -> None:
    cache = KvCache(capacity_tokens=4096, item_bytes=8, item_tokens=512, hit_share=0.6)
    assert [cache.found_items(items) for items in (0, 1, 2, 3, 5, 10)] == [0, 0, 1, 1, 3, 6]


def test_a_product_with_a_share_is_not_rounded_below_a_whole_number() -> None:
    thirds = KvCache(capacity_tokens=1, hit_share=0.3)
    assert all(thirds.found_items(10 * tens) == 3 * tens for tens in range(1, 1000))


def test_checkpoints_are_of_the_found_share() -> None:
    cache = KvCache(capacity_tokens=10_000, item_bytes=8, item_tokens=512, checkpoint_tokens=1024)
    assert [cache.found_items(items) for items in (1, 2, 3, 4, 5)] == [0, 2, 2, 4, 4]
    both = KvCache(capacity_tokens=10_000, hit_share=0.5, checkpoint_tokens=100)
    assert [both.found_items(items) for items in (199, 200, 399, 400)] == [0, 100, 100, 200]


def test_a_part_that_is_not_found_is_not_locked_and_can_be_evicted() -> None:
    cache = KvCache(capacity_tokens=20, item_bytes=1, hit_share=0.5)
    store(cache, b"aaaabbbb")
    found = cache.find(b"aaaabbbbcc")
    assert (found.items, found.evictable_tokens) == (4, 4)
    handle = cache.lock(found)
    assert (cache.locked_tokens, cache.evictable_tokens) == (4, 4)
    cache.unlock(handle)
    cache.check()


def test_a_locked_prefix_is_never_evicted() -> None:
    cache = KvCache(capacity_tokens=6, item_bytes=1)
    store(cache, b"aaa")
    store(cache, b"bbb")
    handle = cache.lock(cache.match(b"aaa"))
    assert cache.available_tokens == 3
    store(cache, b"ccc")
    assert [cached(cache, key) for key in (b"aaa", b"bbb", b"ccc")] == [3, 0, 3]
    cache.unlock(handle)
    assert cache.available_tokens == 6


def test_what_a_sibling_inserted_meanwhile_is_held_once() -> None:
    cache = KvCache(capacity_tokens=100, item_bytes=1)
    first, second = cache.lock(cache.match(b"abcd")), cache.lock(cache.match(b"abce"))
    for _ in range(2):
        cache.reserve(4)
        cache.allocate(4)
    first, first_fresh = cache.insert(b"abcd", first)
    second, second_fresh = cache.insert(b"abce", second)
    assert (first_fresh, second_fresh) == (4, 1)
    assert (cache.cached_tokens, cache.private_tokens) == (5, 0)
    cache.unlock(first)
    cache.unlock(second)
    cache.check()


def test_an_item_is_a_token_of_four_bytes_unless_stated() -> None:
    cache = KvCache(capacity_tokens=2)
    handle = cache.lock(cache.match(b""))
    cache.reserve(2)
    cache.allocate(2)
    handle, fresh = cache.insert(b"oneAtwoB", handle)
    assert (fresh, cache.cached_tokens, cache.free_tokens) == (2, 2, 0)
    assert cache.match(b"oneAtwoC").items == 1


def test_a_block_of_a_trace_counts_its_tokens() -> None:
    cache = KvCache(capacity_tokens=4096, item_bytes=8, item_tokens=512)
    handle = cache.lock(cache.match(b""))
    cache.reserve(1024)
    cache.allocate(1024)
    handle, fresh = cache.insert(b"block--1block--2", handle)
    assert (fresh, cache.cached_tokens) == (1024, 1024)
    assert cache.match(b"block--1block--3").items == 1


class Pool(RuleBasedStateMachine):
    """Any interleaving of requests against one small pool, with a list of what is held as the twin."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = KvCache(capacity_tokens=24, item_bytes=1)
        self.held: list[tuple[CacheNode, bytes, int]] = []

    @rule(key=st.text("ab", min_size=1, max_size=10).map(str.encode))
    def begin(self, key: bytes) -> None:
        """A request is admitted if it fits, and prefilled."""
        match = self.cache.match(key, at_most=len(key) - 1)
        needed = len(key) - match.items
        if needed > self.cache.available_tokens - match.evictable_tokens:
            return
        handle = self.cache.lock(match)
        self.cache.reserve(needed)
        self.cache.allocate(needed)
        self.held.append((handle, key, needed))

    @rule(choice=st.integers(0, 100), keep=st.booleans())
    def end(self, choice: int, keep: bool) -> None:
        """A request ends, with its prompt cached or aborted before."""
        if not self.held:
            return
        handle, key, private = self.held.pop(choice % len(self.held))
        if keep:
            handle, _ = self.cache.insert(key, handle)
            private = 0
            assert cached(self.cache, key) == len(key)
        self.cache.unlock(handle)
        self.cache.release(private=private, promised=0)

    @invariant()
    def accounts_balance(self) -> None:
        self.cache.check()
        assert self.cache.private_tokens == sum(private for _, _, private in self.held)
        for handle, key, _ in self.held:
            assert cached(self.cache, key) >= handle.end, "a held prefix stays"

    def teardown(self) -> None:
        while self.held:
            self.end(0, keep=True)
        assert self.cache.private_tokens == self.cache.locked_tokens == self.cache.reserved_tokens == 0
        assert self.cache.free_tokens + self.cache.cached_tokens == self.cache.capacity_tokens
        self.cache.flush()
        assert self.cache.free_tokens == self.cache.capacity_tokens


Pool.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
test_pool_accounts_balance_under_any_interleaving = Pool.TestCase
