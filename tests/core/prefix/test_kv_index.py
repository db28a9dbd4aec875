"""The index of blocks that engines report: its sources, and the same by a naive twin."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gorgo.core.messages.decision import CacheSource
from gorgo.core.messages.kv_events import (
    BlocksRemoved,
    BlocksStored,
    CacheChanges,
    CacheCleared,
    CacheEvictions,
    CacheSnapshot,
    KvEvent,
    KvEventBatch,
    KvTier,
)
from gorgo.core.messages.request import RouteRequest
from gorgo.core.prefix.kv_feeds import SNAPSHOT_AGE_S, SOURCES, KvFeeds
from gorgo.core.prefix.kv_index import MAX_SOURCES, KvEventIndex, PushedBlocks, Speculation
from gorgo.core.prefix.kv_source import TierBlocks, chain_hashes, chain_root, next_hash, token_bytes

PROMPT = (11, 12, 13, 14, 15, 16)


def index_of(max_blocks: int = 1000) -> KvEventIndex:
    return KvEventIndex(block_tokens=2, max_blocks_per_replica=max_blocks)


def stored(
    *hashes: int,
    tokens: tuple[int, ...] = PROMPT,
    parent: int | None = None,
    tier: KvTier | None = KvTier.GPU,
    block_tokens: int = 2,
    group: int = 0,
    adapter: str | None = None,
    cache_salt: str | None = None,
    extra: dict[int, bytes] | None = None,
) -> BlocksStored:
    packed = token_bytes(tokens)
    return BlocksStored(hashes, parent, packed, block_tokens, tier, group, adapter, cache_salt, extra or {})


def removed(*hashes: int, tier: KvTier | None = KvTier.GPU) -> BlocksRemoved:
    return BlocksRemoved(hashes, tier)


def apply(index: KvEventIndex, slot: int, *events: KvEvent, rank: int = 0) -> None:
    index.apply(slot, KvEventBatch(sent_s=None, rank=rank, events=events))
    index.check()


def matched(index: KvEventIndex, n_slots: int = 2, *, root: int = 0) -> list[float]:
    hashes = chain_hashes(token_bytes(PROMPT), block_tokens=2, root=root)
    found: list[float] = index.match(hashes, n_slots).tolist()
    return found


def test_match_counts_leading_blocks_of_each_replica() -> None:
    index = index_of()
    apply(index, 0, stored(1, 2, 3))
    apply(index, 1, stored(77, tokens=PROMPT[:2]))
    assert matched(index) == [6, 2]


def test_blocks_of_two_engines_match_whatever_their_hashes() -> None:
    index = index_of()
    apply(index, 0, stored(1, 2, 3))
    apply(index, 1, stored(3, 1, 2))
    assert matched(index) == [6, 6]


def test_a_removed_first_block_hides_the_rest_until_it_returns() -> None:
    index = index_of()
    apply(index, 0, stored(1, 2, 3), removed(1))
    assert matched(index) == [0, 0]
    apply(index, 0, stored(1, tokens=PROMPT[:2]))
    assert matched(index) == [6, 0]


def test_a_block_with_two_copies_stays_until_both_are_evicted() -> None:
    index = index_of()
    apply(index, 0, stored(1, 2, 3), stored(1, 2, 3), removed(1, 2, 3))
    assert matched(index) == [6, 0]
    apply(index, 0, removed(1, 2, 3))
    assert matched(index) == [0, 0]
    assert index.blocks(0) == 0


def test_each_copy_is_evicted_once() -> None:
    index = index_of()
    apply(index, 0, *[stored(1, 2, 3)] * 4, *[removed(1, 2, 3)] * 3)
    assert matched(index) == [6, 0]
    apply(index, 0, removed(1, 2, 3))
    assert matched(index) == [0, 0]


def test_a_hash_of_another_block_replaces_all_copies_of_the_first() -> None:
    index = index_of()
    apply(index, 0, *[stored(1, tokens=(8, 9))] * 3, stored(1, tokens=PROMPT[:2]))
    assert matched(index) == [2, 0]
    apply(index, 0, removed(1))
    assert matched(index) == [0, 0]
    assert index.blocks(0) == 0


def test_a_block_in_cpu_memory_counts_less_and_one_in_both_counts_whole() -> None:
    index = index_of()
    apply(index, 0, stored(1, tokens=PROMPT[:2]), stored(1, 2, 3, tier=KvTier.CPU))
    assert matched(index) == pytest.approx([2 + 2 * 0.8 * 2, 0])
    apply(index, 0, removed(1))
    assert matched(index) == pytest.approx([3 * 0.8 * 2, 0])


def test_an_offloaded_block_without_tokens_is_known_by_its_hash() -> None:
    index = index_of()
    offloaded = BlocksStored((1, 2, 9), None, b"", None, KvTier.CPU)
    apply(index, 0, stored(1, 2, 3), offloaded, removed(1, 2, 3))
    assert matched(index) == pytest.approx([2 * 0.8 * 2, 0])
    assert index.stats[0].without_tokens == 1


def test_blocks_after_an_unknown_parent_are_counted_and_left_out() -> None:
    index = index_of()
    apply(index, 0, stored(2, 3, tokens=PROMPT[2:], parent=1))
    assert index.stats[0].unknown_parents == 2
    apply(index, 0, stored(1, tokens=PROMPT[:2]), stored(2, 3, tokens=PROMPT[2:], parent=1))
    assert matched(index) == [6, 0]


def test_a_parent_is_found_in_another_tier_or_rank_but_not_on_another_replica() -> None:
    index = index_of()
    apply(index, 0, stored(1, tokens=PROMPT[:2], tier=KvTier.CPU), rank=1)
    apply(index, 0, stored(2, tokens=PROMPT[2:4], parent=1))
    apply(index, 1, stored(2, tokens=PROMPT[2:4], parent=1))
    assert matched(index) == pytest.approx([2 * 0.8 + 2, 0])
    assert index.stats[1].unknown_parents == 1


def test_a_cleared_rank_leaves_the_others() -> None:
    index = index_of()
    apply(index, 0, stored(1, 2, 3), rank=0)
    apply(index, 0, stored(1, tokens=PROMPT[:2]), rank=1)
    apply(index, 0, CacheCleared(), rank=0)
    assert matched(index) == [2, 0]
    index.clear_replica(0)
    index.check()
    assert matched(index) == [0, 0]


def test_prompts_under_an_adapter_or_a_salt_share_nothing_with_others() -> None:
    index = index_of()
    apply(index, 0, stored(1, 2, 3, adapter="lora"))
    apply(index, 1, stored(4, 5, 6, cache_salt="lora"))
    assert matched(index) == [0, 0]
    assert matched(index, root=chain_root("lora")) == [6, 0]
    assert matched(index, root=chain_root(None, "lora")) == [0, 6]
    assert len({chain_root(), chain_root("a"), chain_root(None, "a"), chain_root("a", ""), chain_root("", "a")}) == 5


def test_an_image_in_a_block_is_part_of_it() -> None:
    index = index_of()
    apply(index, 0, stored(1, 2, 3, extra={1: b"image"}))
    assert matched(index) == [2, 0]
    first, _, _ = chain_hashes(token_bytes(PROMPT), block_tokens=2)
    second = next_hash(first, token_bytes(PROMPT[2:4]), b"image")
    assert index.match([first, second], 1).tolist() == [4]


def test_blocks_of_other_sizes_and_tiers_are_counted_and_left_out() -> None:
    index = index_of()
    apply(index, 0, stored(1, 2, block_tokens=3), stored(1, 2, 3, tier=None), removed(1, tier=None), removed(8))
    stats = index.stats[0]
    assert (stats.other_block_sizes, stats.other_tiers, stats.unknown_removals, stats.stored) == (2, 4, 1, 0)
    assert index.blocks(0) == 0


def test_a_full_replica_evicts_its_own_oldest_blocks_alone() -> None:
    index = index_of(max_blocks=3)
    apply(index, 1, stored(1, 2, 3))
    apply(index, 0, stored(1, 2, 3))
    for number in range(50):
        apply(index, 0, stored(100 + number, tokens=(number, number)), rank=number % 2)
    assert index.blocks(0) <= 3
    assert index.stats[0].evicted >= 50
    assert matched(index) == [0, 6]


def test_a_full_replica_evicts_from_its_largest_cache() -> None:
    index = index_of(max_blocks=3)
    apply(index, 0, *[stored(1, 2, 3)] * 2, rank=0)
    apply(index, 0, stored(9, tokens=(8, 9)), rank=1)
    assert index.match(chain_hashes(token_bytes((8, 9)), block_tokens=2), 1).tolist() == [2]
    assert (index.blocks(0), index.stats[0].evicted) == (3, 1)


def test_ranks_from_the_wire_are_bounded() -> None:
    index = index_of()
    for rank in range(MAX_SOURCES + 5):
        index.apply(0, KvEventBatch(sent_s=None, rank=rank, events=(stored(1, tokens=PROMPT[:2]),)))
    index.check()
    assert index.stats[0].excess_sources == 5
    assert index.blocks(0) == MAX_SOURCES


@pytest.mark.parametrize("n_slots", [0, 1, 3, 64, 200])
def test_match_answers_for_any_number_of_replicas(n_slots: int) -> None:
    index = index_of()
    for slot in range(n_slots):
        blocks = slot % 4
        if blocks:
            apply(index, slot, stored(*range(blocks), tokens=PROMPT[: 2 * blocks]))
    assert matched(index, n_slots) == [2 * (slot % 4) for slot in range(n_slots)]


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_a_token_id_of_more_than_32_bits_is_refused(token_id: int) -> None:
    with pytest.raises(OverflowError):
        token_bytes([token_id])


LIMIT = 6


@dataclass
class Twin:
    """One replica."""

    reported: set[int] = field(default_factory=set)
    confirmed: dict[int, float] = field(default_factory=dict)

    @property
    def blocks(self) -> set[int]:
        return self.reported | set(self.confirmed)

    def replace(self, hashes: list[int]) -> None:
        self.reported &= set(hashes)
        self.add(hashes)

    def add(self, hashes: list[int]) -> None:
        for own in dict.fromkeys(hashes):
            if own in self.confirmed or len(self.blocks | {own}) <= LIMIT:
                self.confirmed.pop(own, None)
                self.reported.add(own)

    def remove(self, hashes: list[int]) -> None:
        for own in hashes:
            self.reported.discard(own)
            self.confirmed.pop(own, None)

    def confirm(self, hashes: list[int], now: float) -> None:
        for own in hashes:
            if own not in self.reported and len(self.blocks | {own}) <= LIMIT:
                self.confirmed[own] = now

    def expire_confirmed(self, before_s: float) -> None:
        self.confirmed = {own: since_s for own, since_s in self.confirmed.items() if since_s >= before_s}


STEPS = st.tuples(
    st.sampled_from(["replace", "add", "remove", "confirm", "settle", "clear"]),
    st.integers(0, 1),
    st.lists(st.integers(0, 9), max_size=8),
)


@given(st.lists(STEPS, max_size=30))
def test_pushed_blocks_agree_with_a_naive_twin(steps: list[tuple[str, int, list[int]]]) -> None:
    tier = TierBlocks()
    pushed, twins = PushedBlocks(tier), {0: Twin(), 1: Twin()}
    for now, (step, slot, hashes) in enumerate(steps):
        twin = twins[slot]
        match step:
            case "replace":
                pushed.replace(slot, hashes, limit=LIMIT)
                twin.replace(hashes)
            case "add":
                pushed.add(slot, hashes, limit=LIMIT)
                twin.add(hashes)
            case "remove":
                pushed.remove(slot, hashes)
                twin.remove(hashes)
            case "confirm":
                pushed.confirm(slot, hashes, limit=LIMIT, now=float(now))
                twin.confirm(hashes, float(now))
            case "settle":
                pushed.expire_confirmed(slot, before_s=now - 2.0)
                twin.expire_confirmed(now - 2.0)
            case "clear":
                pushed.clear_replica(slot)
                twin.remove(list(twin.blocks))
        pushed.check(LIMIT)
        expected = {own: sum(1 << slot for slot in twins if own in twins[slot].blocks) for own in range(10)}
        assert tier.masks == {own: mask for own, mask in expected.items() if mask}
        for each in twins:
            assert (pushed.blocks_of(each), pushed.reported(each)) == (
                len(twins[each].blocks),
                len(twins[each].reported),
            )


def test_confirmed_block_that_the_next_snapshot_shows_is_reported() -> None:
    pushed = PushedBlocks(TierBlocks())
    pushed.confirm(0, [1, 2], limit=LIMIT, now=5.0)
    pushed.replace(0, [1], limit=LIMIT)
    assert (pushed.blocks_of(0), pushed.reported(0)) == (2, 1)
    pushed.expire_confirmed(0, before_s=5.5)
    assert (pushed.blocks_of(0), pushed.reported(0)) == (1, 1)


def test_many_blocks_are_in_parts_of_which_none_is_large() -> None:
    tier = TierBlocks()
    pushed, hashes = PushedBlocks(tier), chain_hashes(bytes(4 * 20_000), block_tokens=1)
    assert pushed.add(0, hashes, limit=20_000) == 0
    assert max(map(len, tier.parts)) < 2 * 20_000 / len(tier.parts)
    # A dict begins with the lowest bits: where they were equal in a part, each access met many other blocks.
    assert min(len({hash(own) % 64 for own in part}) for part in tier.parts) > 20
    assert len(tier.masks) == pushed.blocks_of(0) == 20_000
    pushed.set_max_blocks(10_000)
    assert pushed.blocks_of(0) == len(tier.masks) == 10_000
    assert len(tier.masks.keys() & set(hashes[:10_000])) < 1000


# --- Feeds and the index of reported blocks against naive twins, event by event.


# --- Feeds written the slow and obvious way: each feed lists what it was told, and each block the claims on it.


#: Slot, model, tokens per block.
Place = tuple[int, str | None, int]


@dataclass
class Claim:
    """A dispatched prompt."""

    expires_s: float
    withdrawn: bool = False


@dataclass
class TwinFeed:
    source: CacheSource
    block_tokens: int
    complete: bool = True
    flushed: bool = False
    cleared: bool = False
    reported: set[int] = field(default_factory=set)
    #: By a first token, and in no snapshot yet: the time.
    confirmed: dict[int, float] = field(default_factory=dict)
    #: By block, since its last report.
    claims: dict[int, list[Claim]] = field(default_factory=dict)

    def report(self, own: int) -> None:
        self.reported.add(own)
        self.confirmed.pop(own, None)
        self.claims.pop(own, None)

    def confirm(self, own: int, now: float) -> None:
        if own not in self.reported:
            self.confirmed[own] = now
        self.claims.pop(own, None)

    def evict(self, own: int) -> None:
        self.reported.discard(own)
        self.confirmed.pop(own, None)

    def speculated(self, now: float) -> set[int]:
        last = {own: claims[-1] for own, claims in self.claims.items()}
        return {own for own, claim in last.items() if not claim.withdrawn and claim.expires_s > now}

    def has(self, own: int, now: float) -> bool:
        return own in self.reported or own in self.confirmed or own in self.speculated(now)

    def depth(self, hashes: list[int], now: float) -> int:
        return next((place for place, own in enumerate(hashes) if not self.has(own, now)), len(hashes))


@dataclass
class FeedsTwin:
    """Same contract as `KvFeeds`, without bounds; events store and remove own hashes."""

    feeds: dict[tuple[int, str | None], TwinFeed] = field(default_factory=dict)
    #: Replicas whose events were lost since the last scrape.
    lost: set[int] = field(default_factory=set)

    def feed(self, slot: int, model: str | None, source: CacheSource, block_tokens: int) -> TwinFeed:
        feed = self.feeds.get((slot, model))
        if feed is None or (feed.source, feed.block_tokens) != (source, block_tokens):
            feed = self.feeds[slot, model] = TwinFeed(source, block_tokens)
        return feed

    def drop(self, slot: int, source: CacheSource | None = None) -> None:
        for place, feed in list(self.feeds.items()):
            if place[0] == slot and source in (None, feed.source):
                del self.feeds[place]

    def of(self, slot: int) -> list[TwinFeed]:
        return [feed for (other, _), feed in self.feeds.items() if other == slot]

    def dispatched_to(self, slot: int, model: str | None, sizes: set[int]) -> TwinFeed | None:
        feed = self.feeds.get((slot, model)) or self.feeds.get((slot, None))
        return feed if feed is not None and feed.block_tokens in sizes else None

    def match(
        self, slot: int, model: str | None, hashes: dict[int, list[int]], history: float, now: float
    ) -> tuple[float, set[CacheSource]]:
        """Return the cached tokens, and the sources that have as many."""
        found = [
            (feed.depth(hashes[feed.block_tokens], now) * feed.block_tokens, feed)
            for (other, named), feed in self.feeds.items()
            if other == slot and feed.block_tokens in hashes and (None in (named, model) or named == model)
        ]
        best = max((tokens for tokens, _ in found), default=-1)
        if any(feed.complete for _, feed in found) or (found and best >= history):
            return best, {feed.source for tokens, feed in found if tokens == best}
        return history, {"history"}


# --- The event index written the slow and obvious way: each cache lists the whole prompt up to each of its blocks.


Path = tuple[int, ...]
Cache = tuple[int, int, KvTier, int]


@dataclass
class KvTwin:
    """Same contract as `KvEventIndex` for blocks of one token and no adapter, without a bound."""

    #: Cache (slot, rank, tier, group) and the engine's hash -> the prompt that ends there.
    paths: dict[tuple[Cache, int], Path] = field(default_factory=dict)
    copies: Counter[tuple[Cache, int]] = field(default_factory=Counter)
    unknown: int = 0

    def path(self, slot: int, engine_hash: int) -> Path | None:
        found = {path for (cache, known), path in self.paths.items() if (cache[0], known) == (slot, engine_hash)}
        return next(iter(found), None)

    def store(self, slot: int, rank: int, event: BlocksStored) -> None:
        assert event.tier is not None
        path = () if event.parent is None else self.path(slot, event.parent)
        tokens = list(event.tokens[::4])
        for place, engine_hash in enumerate(event.hashes):
            if not tokens:
                path = self.path(slot, engine_hash)
            elif path is not None:
                path = (*path, tokens[place])
            if path is None:
                self.unknown += 1
                continue
            entry = ((slot, rank, event.tier, event.group), engine_hash)
            if self.paths.get(entry, path) != path:
                self.copies[entry] = 0
            self.paths[entry] = path
            self.copies[entry] += 1

    def remove(self, slot: int, rank: int, event: BlocksRemoved) -> None:
        assert event.tier is not None
        for engine_hash in event.hashes:
            entry = ((slot, rank, event.tier, event.group), engine_hash)
            if entry in self.paths:
                self.copies[entry] -= 1
                if not self.copies[entry]:
                    del self.paths[entry]

    def clear(self, slot: int, rank: int | None) -> None:
        for entry in [entry for entry in self.paths if entry[0][0] == slot and rank in (None, entry[0][1])]:
            del self.paths[entry]
            self.copies[entry] = 0

    def match(self, prompt: Path, slot: int) -> float:
        total = 0.0
        for length in range(1, len(prompt) + 1):
            tiers = {
                cache[2] for (cache, _), path in self.paths.items() if cache[0] == slot and path == prompt[:length]
            }
            if not tiers:
                break
            total += 1.0 if KvTier.GPU in tiers else 0.8
        return total

    def blocks(self, slot: int) -> int:
        return sum(cache[0] == slot for cache, _ in self.paths)


# --- Feeds of all kinds against their naive twin: events, pushes, losses, restarts and dispatched prompts in any
# order.


REPLICAS = 2
SLOTS = st.integers(0, REPLICAS - 1)
MODELS = st.sampled_from([None, "m"])
#: Mostly one size, so that what is sent is reported.
SIZES = st.sampled_from([1, 1, 1, 2])
#: Few symbols, so that prompts share, part and nest.
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=4)


def hashes_of(prompt: list[int], block_tokens: int) -> list[int]:
    return chain_hashes(token_bytes(prompt), block_tokens=block_tokens)


def request(prompt: list[int], model: str | None, sizes: set[int]) -> RouteRequest:
    hashes = {size: hashes_of(prompt, size) for size in sizes}
    return RouteRequest("r", 0.0, len(prompt), b"", 64.0, 0, model=model, kv_hashes=hashes)


class FeedsAndTwin(RuleBasedStateMachine):
    """Does the same to both and compares all that can be seen."""

    @initialize()
    def start(self) -> None:
        self.now = 0.0
        self.feeds = KvFeeds(max_blocks=10_000)
        self.feeds.set_replicas(list(range(REPLICAS)))
        self.twin = FeedsTwin()
        self.sent: list[tuple[Speculation, Claim]] = []

    def apply(self, slot: int, model: str | None, size: int, complete: bool, event: KvEvent) -> None:
        batch = KvEventBatch(sent_s=None, rank=0, events=(event,))
        self.feeds.apply(slot, batch, model=model, block_tokens=size, complete=complete, now=self.now)
        feed = self.twin.feed(slot, model, "events", size)
        if isinstance(event, CacheCleared):
            feed.reported.clear()
            feed.cleared, feed.flushed = True, False
        feed.complete = complete and not feed.flushed

    @rule(slot=SLOTS, model=MODELS, size=SIZES, prompt=PROMPTS, complete=st.booleans())
    def store(self, slot: int, model: str | None, size: int, prompt: list[int], complete: bool) -> None:
        own = hashes_of(prompt, size)
        tokens = token_bytes(prompt[: len(own) * size])
        # A hash of the engine per block, as its own hash is: a block stored again is a copy, which is evicted first.
        fresh = [
            place for place, each in enumerate(own) if each not in self.twin.feed(slot, model, "events", size).reported
        ]
        stored = tuple(each for each in own[: fresh[0]]) if fresh else ()
        parent = stored[-1] if stored else None
        first = fresh[0] if fresh else len(own)
        event = BlocksStored(tuple(own[first:]), parent, tokens[first * size * 4 :], size, KvTier.GPU)
        known = [each for each in own[first:] if each in self.twin.feed(slot, model, "events", size).reported]
        self.apply(slot, model, size, complete, BlocksRemoved(tuple(known), KvTier.GPU))
        self.apply(slot, model, size, complete, event)
        for each in own[first:]:
            self.twin.feed(slot, model, "events", size).report(each)

    @rule(slot=SLOTS, model=MODELS, size=SIZES, prompt=PROMPTS, complete=st.booleans())
    def remove(self, slot: int, model: str | None, size: int, prompt: list[int], complete: bool) -> None:
        last = hashes_of(prompt, size)[-1:]
        self.apply(slot, model, size, complete, BlocksRemoved(tuple(last), KvTier.GPU))
        self.twin.feed(slot, model, "events", size).reported.difference_update(last)

    @rule(slot=SLOTS, model=MODELS, size=SIZES, complete=st.booleans())
    def clear(self, slot: int, model: str | None, size: int, complete: bool) -> None:
        self.apply(slot, model, size, complete, CacheCleared())

    @rule(slot=SLOTS, model=MODELS, size=SIZES, prompts=st.lists(PROMPTS, max_size=3))
    def push(self, slot: int, model: str | None, size: int, prompts: list[list[int]]) -> None:
        own = [each for prompt in prompts for each in hashes_of(prompt, size)]
        self.feeds.replace(slot, CacheSnapshot(model, size, own), now=self.now)
        known = self.twin.feeds.get((slot, model))
        if known is None or known.source == "push":
            feed = self.twin.feed(slot, model, "push", size)
            feed.reported.clear()
            for each in own:
                feed.report(each)
            feed.confirmed = {each: at_s for each, at_s in feed.confirmed.items() if at_s >= self.now - SNAPSHOT_AGE_S}

    @rule(slot=SLOTS, model=MODELS, size=SIZES, prompt=PROMPTS)
    def evict(self, slot: int, model: str | None, size: int, prompt: list[int]) -> None:
        last = hashes_of(prompt, size)[-1:]
        self.feeds.evict(slot, CacheEvictions(model, size, last), now=self.now)
        feed = self.twin.feeds.get((slot, model))
        if feed is not None and (feed.source, feed.block_tokens) == ("push", size):
            for each in last:
                feed.evict(each)

    @rule(slot=SLOTS, model=MODELS, size=SIZES, added=PROMPTS, removed=PROMPTS, whole=st.booleans())
    def change(
        self, slot: int, model: str | None, size: int, added: list[int], removed: list[int], whole: bool
    ) -> None:
        """A part of the difference to the last snapshot."""
        new, old = hashes_of(added, size), hashes_of(removed, size)[-1:]
        self.feeds.change(slot, CacheChanges(model, size, new, old, whole=whole), now=self.now)
        feed = self.twin.feeds.get((slot, model))
        if feed is not None and (feed.source, feed.block_tokens) == ("push", size):
            for each in old:
                feed.evict(each)
            for each in new:
                feed.report(each)
            if whole:
                young = {each: at_s for each, at_s in feed.confirmed.items() if at_s >= self.now - SNAPSHOT_AGE_S}
                feed.confirmed = young

    @rule(slot=SLOTS, what=st.sampled_from(["lose", "flush", "scrape", "restart", "replace"]))
    def disturb(self, slot: int, what: str) -> None:
        feeds = [(place, feed) for place, feed in self.twin.feeds.items() if place[0] == slot]
        match what:
            case "lose":
                self.feeds.lose_events(slot)
                self.twin.drop(slot, "events")
                self.twin.lost.add(slot)
            case "flush":
                self.feeds.flush(slot)
                self.twin.drop(slot, "push")
                for _, feed in feeds:
                    feed.reported.clear()
                    feed.claims.clear()
                    feed.complete, feed.flushed = False, True
            case "scrape":
                self.feeds.scraped(slot)
                self.twin.lost.discard(slot)
                for _, feed in feeds:
                    feed.cleared = False
            case "restart":
                self.feeds.restarted(slot)
                for place, feed in feeds:
                    if not feed.cleared and not (feed.source == "events" and slot in self.twin.lost):
                        del self.twin.feeds[place]
            case "replace":
                self.feeds.remove_replica(slot)
                self.feeds.set_replicas(list(range(REPLICAS)))
                self.twin.drop(slot)
                self.twin.lost.discard(slot)

    @rule(
        slot=SLOTS,
        model=MODELS,
        sizes=st.sampled_from([{1}, {1, 2}, {2}, set()]),
        prompt=PROMPTS,
        lasts_s=st.integers(1, 3),
    )
    def dispatch(self, slot: int, model: str | None, sizes: set[int], prompt: list[int], lasts_s: int) -> None:
        sent, expires_s = request(prompt, model, sizes), self.now + lasts_s
        match = self.feeds.match(sent, np.zeros(REPLICAS), now=self.now)
        depth = 0 if match is None else int(match.blocks[slot])
        speculation = self.feeds.speculate(slot, sent, found_blocks=depth, expires_s=expires_s)
        feed = self.twin.dispatched_to(slot, model, sizes)
        assert (speculation is None) == (feed is None)
        if speculation is not None and feed is not None:
            claim = Claim(expires_s)
            self.sent.append((speculation, claim))
            for each in hashes_of(prompt, feed.block_tokens)[depth:]:
                feed.claims.setdefault(each, []).append(claim)

    @rule(pick=st.integers(0, 1000), prompt=PROMPTS, lasts_s=st.integers(1, 3))
    def dispatch_to_a_feed(self, pick: int, prompt: list[int], lasts_s: int) -> None:
        for (slot, model), feed in self.feed_of(pick):
            self.dispatch(slot, model, {feed.block_tokens}, prompt, lasts_s)

    @rule(pick=st.integers(0, 1000), prompt=PROMPTS, complete=st.booleans(), once=st.booleans())
    def report_to_a_feed(self, pick: int, prompt: list[int], complete: bool, once: bool) -> None:
        """More of what a feed has: stored, pushed, or confirmed by a first token."""
        for (slot, model), feed in self.feed_of(pick):
            if feed.source == "push" and once:
                self.confirm(slot, model, {feed.block_tokens}, prompt)
            elif feed.source == "push":
                self.push(slot, model, feed.block_tokens, [prompt])
            else:
                self.store(slot, model, feed.block_tokens, prompt, complete)

    def feed_of(self, pick: int) -> list[tuple[tuple[int, str | None], TwinFeed]]:
        """One of the feeds, if there is any."""
        feeds = list(self.twin.feeds.items())
        return feeds[pick % max(1, len(feeds)) :][:1]

    @rule(pick=st.integers(0, 1000))
    def withdraw(self, pick: int) -> None:
        if self.sent:
            speculation, claim = self.sent.pop(pick % len(self.sent))
            self.feeds.withdraw(speculation)
            claim.withdrawn = True

    @rule(slot=SLOTS, model=MODELS, sizes=st.sampled_from([{1}, {1, 2}, {2}, set()]), prompt=PROMPTS)
    def confirm(self, slot: int, model: str | None, sizes: set[int], prompt: list[int]) -> None:
        self.feeds.confirm(slot, request(prompt, model, sizes), now=self.now)
        feed = self.twin.dispatched_to(slot, model, sizes)
        if feed is not None and feed.source == "push":
            for each in hashes_of(prompt, feed.block_tokens):
                feed.confirm(each, self.now)

    @rule(seconds=st.integers(1, 2))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @rule(model=MODELS, sizes=st.sampled_from([{1}, {1, 2}, {2}, set()]), prompt=PROMPTS, history=st.integers(0, 6))
    def match(self, model: str | None, sizes: set[int], prompt: list[int], history: int) -> None:
        sent, matched = request(prompt, model, sizes), np.full(REPLICAS, float(history))
        match = self.feeds.match(sent, matched, now=self.now)
        hashes = {size: hashes_of(prompt, size) for size in sizes}
        for slot in range(REPLICAS):
            tokens, sources = self.twin.match(slot, model, hashes, history, self.now)
            assert matched[slot] == tokens
            assert ("history" if match is None else SOURCES[match.sources[slot]]) in sources

    @rule(model=MODELS, slots=st.sets(SLOTS))
    def block_sizes(self, model: str | None, slots: set[int]) -> None:
        assert self.feeds.block_sizes(slots, model) == {
            feed.block_tokens
            for (slot, named), feed in self.twin.feeds.items()
            if slot in slots and (None in (named, model) or named == model)
        }

    @invariant()
    def same_blocks(self) -> None:
        self.feeds.check()
        for slot in range(REPLICAS):
            assert self.feeds.blocks(slot) == sum(
                len(feed.reported) + len(feed.confirmed) for feed in self.twin.of(slot)
            )
            speculated = sum(len(feed.speculated(self.now)) for feed in self.twin.of(slot))
            assert self.feeds.speculated_blocks(slot, now=self.now) == speculated


TestFeedsAndTwin = FeedsAndTwin.TestCase
TestFeedsAndTwin.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


# --- The event index against its naive twin, event by event.


SLOTS_KV_INDEX_PROPERTIES = st.integers(0, 2)
RANKS = st.integers(0, 1)
TIERS = st.sampled_from(KvTier)
GROUPS = st.integers(0, 1)
#: A prompt's blocks of one token each: few symbols, so that prompts share, part and nest.
PROMPTS_KV_INDEX_PROPERTIES = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple)


def engine_hash(slot: int, path: tuple[int, ...]) -> int:
    """What an engine with a seed of its own would have: another number on each replica."""
    return hash((slot, path)) & (2**64 - 1)


class KvIndexAndTwin(RuleBasedStateMachine):
    """Does the same to both and compares all that can be seen."""

    @initialize()
    def start(self) -> None:
        self.index = KvEventIndex(block_tokens=1, max_blocks_per_replica=10_000)
        self.twin = KvTwin()

    def apply(self, slot: int, rank: int, event: KvEvent) -> None:
        self.index.apply(slot, KvEventBatch(sent_s=None, rank=rank, events=(event,)))
        match event:
            case BlocksStored():
                self.twin.store(slot, rank, event)
            case BlocksRemoved():
                self.twin.remove(slot, rank, event)
            case CacheCleared():
                self.twin.clear(slot, rank)

    @rule(
        prompt=PROMPTS_KV_INDEX_PROPERTIES,
        start=st.integers(0, 4),
        slot=SLOTS_KV_INDEX_PROPERTIES,
        rank=RANKS,
        tier=TIERS,
        group=GROUPS,
        bare=st.booleans(),
    )
    def store(
        self, prompt: tuple[int, ...], start: int, slot: int, rank: int, tier: KvTier, group: int, bare: bool
    ) -> None:
        """Any part of a prompt, its parent known or not; without tokens where `bare`."""
        start = min(start, len(prompt) - 1)
        hashes = tuple(engine_hash(slot, prompt[: place + 1]) for place in range(start, len(prompt)))
        parent = engine_hash(slot, prompt[:start]) if start else None
        tokens = b"" if bare else token_bytes(prompt[start:])
        self.apply(slot, rank, BlocksStored(hashes, parent, tokens, None if bare else 1, tier, group))

    @rule(
        prompt=PROMPTS_KV_INDEX_PROPERTIES,
        slot=SLOTS_KV_INDEX_PROPERTIES,
        rank=RANKS,
        tier=TIERS,
        group=GROUPS,
        whole=st.booleans(),
    )
    def remove(self, prompt: tuple[int, ...], slot: int, rank: int, tier: KvTier, group: int, whole: bool) -> None:
        """One block, wherever it is in a prompt, or all of a prompt."""
        lengths = range(1, len(prompt) + 1) if whole else (len(prompt),)
        hashes = tuple(engine_hash(slot, prompt[:length]) for length in lengths)
        self.apply(slot, rank, BlocksRemoved(hashes, tier, group))

    @rule(
        first=PROMPTS_KV_INDEX_PROPERTIES,
        second=PROMPTS_KV_INDEX_PROPERTIES,
        slot=SLOTS_KV_INDEX_PROPERTIES,
        rank=RANKS,
        tier=TIERS,
    )
    def collide(self, first: tuple[int, ...], second: tuple[int, ...], slot: int, rank: int, tier: KvTier) -> None:
        """One engine hash for two blocks, one after the other: the second replaces the first."""
        for token in (first[0], second[0]):
            self.apply(slot, rank, BlocksStored((1,), None, token_bytes((token,)), 1, tier))
        self.apply(slot, rank, BlocksRemoved((1,) * 4, tier))

    @rule(slot=SLOTS_KV_INDEX_PROPERTIES, rank=RANKS)
    def clear_rank(self, slot: int, rank: int) -> None:
        self.apply(slot, rank, CacheCleared())

    @rule(slot=SLOTS_KV_INDEX_PROPERTIES)
    def restart(self, slot: int) -> None:
        self.index.clear_replica(slot)
        self.twin.clear(slot, None)

    @rule(prompt=PROMPTS_KV_INDEX_PROPERTIES)
    def match(self, prompt: tuple[int, ...]) -> None:
        found = self.index.match(chain_hashes(token_bytes(prompt), block_tokens=1), 3)
        assert found.tolist() == pytest.approx([self.twin.match(prompt, slot) for slot in range(3)])

    @invariant()
    def same_counts(self) -> None:
        self.index.check()
        assert [self.index.blocks(slot) for slot in range(3)] == [self.twin.blocks(slot) for slot in range(3)]
        assert (
            sum(each.unknown_parents + each.without_tokens for each in self.index.stats.values()) == self.twin.unknown
        )


TestKvIndexAndTwin = KvIndexAndTwin.TestCase
TestKvIndexAndTwin.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
