"""Short messages are decoded in one step and applied in another; nothing comes between the two."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.msgpack import encode

from gorgo.core.messages.kv_events import BlocksRemoved, KvEventBatch
from gorgo.engines.kv_sources import KvEventSource
from gorgo.live.kv_events.feed import Apply
from gorgo.live.kv_events.subscription import Subscription
from gorgo.live.kv_feed_stats import FeedState, KvFeedStats


class Sink:
    """In the place of the applier: the numbers of the blocks that were removed, in order."""

    def __init__(self) -> None:
        self.applied: list[int] = []
        self.forgotten = False

    def apply_batch(self, batch: KvEventBatch, era: int, subscription: Subscription) -> None:
        self.applied += [own for event in batch.events if isinstance(event, BlocksRemoved) for own in event.hashes]

    async def apply_message(self, action: Apply, subscription: Subscription) -> None:
        self.applied.append(-1)

    async def forget_blocks(self, subscription: Subscription, *, restarted: bool) -> None:
        self.forgotten = True
        self.applied.append(-2)

    def changed(self) -> None:
        """Ignore it."""


def message(number: int) -> list[bytes]:
    payload = encode([1.0, [{"type": "BlockRemoved", "block_hashes": [number]}], 0])
    return [b"", number.to_bytes(8, "big"), payload]


@pytest.fixture
async def live() -> tuple[Subscription, Sink]:
    """A subscription that has had message 0, without sockets."""
    sink, source = Sink(), KvEventSource("tcp://127.0.0.1:0", None, "")
    sockets: Any = SimpleNamespace()
    slots, stats = asyncio.Semaphore(1), KvFeedStats(state=FeedState.LIVE)
    found = Subscription("r0", source, sockets, slots, sink, stats, lambda: 1.0)
    await found._handle(lambda: found.feed.connected(now=1.0))
    await found._handle(lambda: found.feed.received(0, message(0)[-1], now=1.0))
    sink.applied.clear()
    return found, sink


async def test_a_message_is_applied_in_the_step_after_it_was_decoded(live: tuple[Subscription, Sink]) -> None:
    subscription, sink = live
    assert subscription.take_message(message(1))
    assert (sink.applied, subscription._stats.messages) == ([], 0), "a message that counts is applied"
    assert (subscription.finish_message(), sink.applied, subscription.finish_message()) == (True, [1], False)
    assert subscription._stats.messages == 1


async def test_an_input_waits_for_the_message_before_it(live: tuple[Subscription, Sink]) -> None:
    subscription, sink = live
    assert subscription.take_message(message(1))
    await subscription._handle(lambda: subscription.feed.received(2, message(2)[-1], now=1.0))
    assert sink.applied == [1, -1]


async def test_blocks_are_forgotten_behind_the_message_before_a_restart(live: tuple[Subscription, Sink]) -> None:
    subscription, sink = live
    assert subscription.take_message(message(1))
    await subscription._handle(lambda: subscription.feed.received(0, message(7)[-1], now=1.0))
    assert (sink.forgotten, sink.applied) == (True, [1, -2, -1])
