"""Feeds and the index of reported blocks against naive twins, event by event."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
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
from gorgo.core.prefix.kv_index import KvEventIndex, Speculation
from gorgo.core.prefix.kv_source import chain_hashes, token_bytes

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
