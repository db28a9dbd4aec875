"""Feeds written the slow and obvious way: each feed lists what it was told, and each block the claims on it."""

from __future__ import annotations

from dataclasses import dataclass, field

from gorgo.core.messages.decision import CacheSource

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
