"""Caches of simulated engines, and the blocks that they report against their contents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gorgo.lab.sim.engine.engines import Engine, make_engine
from gorgo.lab.sim.engine.kv_cache import BlockPool, CacheNode, KvCache
from gorgo.lab.sim.engine.request import EngineRequest
from tests.lab.sim.fleets import round_profile


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


# --- The reported blocks of both kinds of cache against the caches' own contents.


Kind = Literal["sglang", "vllm"]
KINDS = get_args(Kind)


class Twin:
    """A mirror of a cache from its reports alone: copies of each block, and the whole prefix of each."""

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.copies: Counter[int] = Counter()
        self.prefixes: dict[int, bytes] = {}
        self.calls: list[str] = []

    def stored(self, hashes: Sequence[int], parent: int | None, items: bytes) -> None:
        assert len(items) == len(hashes) * self.block_bytes, "the items are those of the blocks"
        assert hashes, "an empty report is none"
        prefix = b"" if parent is None else self.prefixes[parent]
        for place, one in enumerate(hashes):
            prefix += items[place * self.block_bytes : (place + 1) * self.block_bytes]
            assert self.prefixes.setdefault(one, prefix) == prefix, "a hash names one prefix"
            self.copies[one] += 1
        self.calls.append(f"stored {prefix.decode()}")

    def removed(self, hashes: Sequence[int]) -> None:
        for one in hashes:
            assert self.copies[one] > 0, "only what is cached is removed"
            self.copies[one] -= 1
        self.calls.append(f"removed {len(hashes)}")

    def cleared(self) -> None:
        self.copies.clear()
        self.calls.append("cleared")

    def contents(self) -> Counter[bytes]:
        """Return the copies of each prefix that ends with a cached block."""
        return Counter({self.prefixes[one]: count for one, count in self.copies.items() if count})


def cached_prefixes(engine: Engine[Any], keys: set[bytes], block_bytes: int) -> Counter[bytes]:
    """Return the same, of the cache itself: every prefix of `keys`, which are all keys that it has been given."""
    prefixes = {key[:end] for key in keys for end in range(block_bytes, len(key) + 1, block_bytes)}
    if isinstance(engine.cache, BlockPool):
        copies = engine.cache._copies
        return Counter(
            {
                prefix: len(found)
                for prefix in prefixes
                if (found := copies.get(engine.cache.contents(prefix)[-1])) is not None
            }
        )
    assert isinstance(engine.cache, KvCache)
    return Counter({prefix: 1 for prefix in prefixes if engine.cache.match(prefix).items == len(prefix)})


def engine_of(kind: Kind, *, tokens: int = 40, block_tokens: int = 4) -> Engine[EngineRequest]:
    profile = round_profile(kv_tokens=tokens, chunk_tokens=8, max_running_requests=3)
    profile = replace(profile, scheduler=kind, block_tokens=block_tokens)
    return make_engine(profile, item_bytes=1)


def observed(kind: Kind, **options: int) -> tuple[Engine[EngineRequest], Twin]:
    engine = engine_of(kind, **options)
    twin = Twin(engine.cache.event_tokens)
    engine.cache.report_to(twin)
    return engine, twin


def request(prompt: str, output: str = "") -> EngineRequest:
    """A letter is a token; the last token of an answer is never cached."""
    return EngineRequest(
        prompt.encode(), prompt_tokens=len(prompt), output_tokens=len(output) + 1, output_key=output.encode()
    )


def serve(engine: Engine[EngineRequest], *requests: EngineRequest) -> None:
    for one in requests:
        engine.submit(one, now=0.0)
    for _ in run(engine):
        pass


def run(engine: Engine[EngineRequest]) -> Iterator[None]:
    now = 0.0
    while (step := engine.start_step(now=now)) is not None:
        now = step.ends_s
        yield
        engine.finish_step(step)
        yield


def test_an_engine_of_sglangs_kind_reports_a_prompt_after_its_whole_prefill() -> None:
    engine, twin = observed("sglang")
    engine.submit(request("a" * 12 + "b"), now=0.0)
    steps = run(engine)
    for _ in range(3):  # Eight of its 13 tokens, and the rest under way.
        next(steps)
        assert twin.calls == []
    next(steps)
    assert twin.calls == ["stored aaaaaaaaaaaa"]


def test_an_engine_of_vllms_kind_reports_a_block_when_its_last_token_is_scheduled() -> None:
    engine, twin = observed("vllm")
    engine.submit(request("a" * 12 + "b"), now=0.0)
    steps = run(engine)
    next(steps)
    assert twin.calls == ["stored aaaaaaaa"]
    next(steps)
    next(steps)
    assert twin.calls == ["stored aaaaaaaa", "stored aaaaaaaaaaaa"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_generated_is_reported_behind_the_prompt(kind: Kind) -> None:
    engine, twin = observed(kind)
    serve(engine, request("abcdef", "ghij"))
    assert twin.contents() == Counter([b"abcd", b"abcdefgh"])


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_evicted_is_reported_as_removed_and_a_flush_as_cleared(kind: Kind) -> None:
    engine, twin = observed(kind, tokens=16)
    serve(engine, request("a" * 8))
    assert set(twin.contents()) == {b"aaaa", b"aaaaaaaa"}
    serve(engine, request("b" * 14))
    assert set(twin.contents()) == {b"bbbb", b"bbbbbbbb", b"bbbbbbbbbbbb"}
    assert engine.flush()
    assert twin.calls[-1] == "cleared"


def test_two_copies_of_a_block_are_stored_and_removed_one_by_one() -> None:
    """Both prompts of whole blocks compute the last one again: a copy each."""
    engine, twin = observed("vllm", tokens=16)
    serve(engine, request("a" * 8))
    serve(engine, request("a" * 8))
    assert twin.contents() == Counter({b"aaaa": 1, b"aaaaaaaa": 2})


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_of_a_trace_is_one_item(kind: Kind) -> None:
    profile = replace(round_profile(kv_tokens=4096, chunk_tokens=2048, max_running_requests=2), scheduler=kind)
    engine: Engine[EngineRequest] = make_engine(profile, item_bytes=8, item_tokens=512)
    twin = Twin(8)
    engine.cache.report_to(twin)
    serve(engine, EngineRequest(b"block--1block--2", prompt_tokens=1100, output_tokens=1))
    assert (engine.cache.event_tokens, twin.calls) == (512, ["stored block--1block--2"])


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_that_caches_nothing_reports_nothing(kind: Kind) -> None:
    profile = replace(round_profile(kv_tokens=64, chunk_tokens=8), scheduler=kind, block_tokens=4, prefix_cache=False)
    engine: Engine[EngineRequest] = make_engine(profile, item_bytes=1)
    twin = Twin(4)
    engine.cache.report_to(twin)
    serve(engine, request("a" * 12))
    assert twin.calls == []


REQUESTS = st.lists(
    st.tuples(
        st.text("ab", min_size=1, max_size=18),
        st.text("c", max_size=5),
        st.integers(0, 3),  # steps until the next one
        st.booleans(),  # aborted then
    ),
    max_size=25,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(kind=st.sampled_from(KINDS), requests=REQUESTS, flush=st.booleans(), block_tokens=st.sampled_from([1, 3, 4]))
def test_the_reports_are_the_contents_of_the_cache_at_every_step(
    kind: Kind, requests: list[tuple[str, str, int, bool]], flush: bool, block_tokens: int
) -> None:
    engine, twin = observed(kind, tokens=36, block_tokens=block_tokens)
    keys: set[bytes] = set()
    steps = run(engine)
    for prompt, output, advance, aborted in requests:
        one = request(prompt, output)
        keys.add(one.key + one.output_key)
        engine.submit(one, now=0.0)
        for _ in range(2 * advance):
            if next(steps, "idle") == "idle":
                steps = run(engine)
            assert twin.contents() == cached_prefixes(engine, keys, block_tokens)
        if aborted:
            engine.abort(one)
        if flush:
            engine.flush()
        assert twin.contents() == cached_prefixes(engine, keys, block_tokens)
    event(f"{kind}: " + ("removals" if any(call.startswith("removed") for call in twin.calls) else "no removals"))
    for _ in steps:
        assert twin.contents() == cached_prefixes(engine, keys, block_tokens)
