"""Processor time per KV event without sockets: messages of `kv_subscribers`, from their bytes to the index.

Each time is the least of several rounds of one message, and their median over messages: other processes of the machine
hardly change it.
"""

from __future__ import annotations

import asyncio
from itertools import islice
from time import perf_counter
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import uvloop

from gorgo.core.fleet.replica import ReplicaSpec
from gorgo.core.messages.kv_events import KvEventBatch
from gorgo.core.router import Router
from gorgo.engines.kv_events import decode_message
from gorgo.engines.kv_sources import KvEventSource
from gorgo.live.kv_events.subscriber import KvSubscriptions
from gorgo.live.kv_events.subscription import Subscription
from gorgo.policies.registry import make_policy
from tests.bench.kv_publishers import BLOCK_TOKENS, EVENTS_PER_MESSAGE, REPLICAS, RETAINED, payloads
from tests.bench.kv_subscribers import make_subscriber

MESSAGES, ROUNDS = 200, 20


def run() -> None:
    """Print the microseconds of an event: decoded, applied to the index, and in all."""
    messages = list(islice(payloads(), RETAINED, RETAINED + MESSAGES))
    router = _router()
    batches = [decode_message(message) for message in messages]
    decode = _least([_spent(decode_message, message) for message in messages] for _ in range(ROUNDS))
    apply = _least([_spent(_apply, router, batch) for batch in batches] for _ in range(ROUNDS))
    whole = _least(uvloop.run(_whole(messages)) for _ in range(ROUNDS))
    print(f"{EVENTS_PER_MESSAGE} events a message; us an event: ", end="")
    print(f"decode {decode:.2f}, apply {apply:.2f}, in all {whole:.2f}")
    router.check()


async def _whole(messages: list[bytes]) -> list[float]:
    """Return the time of each message from its arrival on."""
    router, feeds = _router(), KvSubscriptions()
    subscriber = make_subscriber(feeds, router, "r0", 0)
    subscriber._reset()
    source = KvEventSource("tcp://127.0.0.1:0", None, "")
    applier, stats, sockets = subscriber._applier, subscriber._stats, cast(Any, SimpleNamespace())
    subscription = Subscription("r0", source, sockets, feeds.replay_slots, applier, stats, lambda: 1.0)
    subscriber._subscriptions = [subscription]
    await subscription._handle(lambda: subscription.feed.connected(now=1.0))
    frames = [[b"", number.to_bytes(8, "big"), payload] for number, payload in enumerate(messages)]
    await subscription._handle(lambda: subscription.feed.received(0, messages[0], now=1.0))
    spent = []
    for message in frames[1:]:
        began_s = perf_counter()
        assert subscription.take_message(message)
        assert subscription.finish_message()
        spent.append(perf_counter() - began_s)
    await asyncio.sleep(0)
    assert stats.events == EVENTS_PER_MESSAGE * len(messages)
    return spent


def _router() -> Router:
    specs = [ReplicaSpec(f"r{number}", "here") for number in range(REPLICAS)]
    return Router(specs, make_policy("gorgo-ms"), rng=np.random.default_rng(0), boot_id="bench")


def _apply(router: Router, batch: KvEventBatch) -> None:
    router.caches.on_kv_events("r0", batch, model=None, block_tokens=BLOCK_TOKENS, complete=True, now=1.0)


def _spent(work: Any, *arguments: Any) -> float:
    began_s = perf_counter()
    work(*arguments)
    return perf_counter() - began_s


def _least(rounds: Any) -> float:
    """Return the microseconds of an event: the least of a message's rounds, the median of messages."""
    return float(np.median(np.min(list(rounds), axis=0))) / EVENTS_PER_MESSAGE * 1e6
