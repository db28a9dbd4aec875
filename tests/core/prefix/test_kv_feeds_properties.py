"""Feeds of all kinds against their naive twin: events, pushes, losses, restarts and dispatched prompts in any order."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

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
from gorgo.core.prefix.kv_source import chain_hashes, token_bytes
from gorgo.core.prefix.kv_speculation import Speculation
from tests.core.prefix.feeds_twin import Claim, FeedsTwin, TwinFeed

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
