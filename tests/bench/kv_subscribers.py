"""Processor time of a proxy's subscriptions at two million KV events a minute, from eight publishers over sockets.

Each publisher sends 50 messages a second: two prompts stored, 40 blocks each, and as many removals of one block.
The publishers are a process of their own.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import count
from types import SimpleNamespace
from typing import cast

import numpy as np
import uvloop
from msgspec.msgpack import encode

from gorgo.config.model import KvEventsConfig
from gorgo.core.fleet.spec import ReplicaSpec
from gorgo.core.messages.actions import Action
from gorgo.core.router import Router
from gorgo.engines.registry import dialect
from gorgo.live.kv_events.extra import available, import_zmq
from gorgo.live.kv_events.feeds import KvSubscriptions
from gorgo.live.kv_events.subscriber import KvSubscriber
from gorgo.live.upstream.target import Target
from gorgo.policies.registry import make_policy

REPLICAS = 8
MESSAGES_PER_S = 50
STORED, BLOCKS, BLOCK_TOKENS = 2, 40, 16
EVENTS_PER_S = REPLICAS * MESSAGES_PER_S * (STORED + STORED * BLOCKS)
SECONDS = 10.0


def run() -> None:
    """Print the share of a processor, for a subscriber of eight replicas."""
    if not available():
        print("pyzmq is not installed (extra `events`)")
        return
    publishers = subprocess.Popen(
        [sys.executable, "-m", "tests.bench.kv_subscribers"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert publishers.stdout is not None
        ports = [int(port) for port in publishers.stdout.readline().split()]
        uvloop.run(_measure(ports))
    finally:
        publishers.kill()
        publishers.communicate()


async def _measure(ports: list[int]) -> None:
    names = [f"r{number}" for number in range(REPLICAS)]
    specs = [ReplicaSpec(name, "here") for name in names]
    router = Router(specs, make_policy("gorgo-ms"), rng=np.random.default_rng(0), boot_id="bench")
    feeds = KvSubscriptions()
    tasks = [
        asyncio.create_task(make_subscriber(feeds, router, *pair).run()) for pair in zip(names, ports, strict=True)
    ]
    await asyncio.sleep(2.0)
    stats = list(feeds.stats.values())
    events, messages = sum(each.events for each in stats), sum(each.messages for each in stats)
    wall_s, processor_s = time.perf_counter(), time.process_time()
    lateness = await _lateness(SECONDS)
    wall_s, processor_s = time.perf_counter() - wall_s, time.process_time() - processor_s
    events, messages = sum(each.events for each in stats) - events, sum(each.messages for each in stats) - messages
    states = sorted({each.state.value for each in stats})
    print(f"{events / wall_s * 60 / 1e6:.2f} M events a minute in {messages / wall_s:.0f} messages a second, {states}")
    print(f"{processor_s / wall_s:.1%} of a processor, {processor_s / max(events, 1) * 1e6:.2f} us an event")
    print(f"event loop late by p50 {np.median(lateness) * 1e3:.2f} ms, p99 {np.quantile(lateness, 0.99) * 1e3:.2f} ms")
    router.check()
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await feeds.aclose()


def make_subscriber(feeds: KvSubscriptions, router: Router, name: str, port: int) -> KvSubscriber:
    """Return the subscriber of a replica whose publisher is at `port`."""
    target = SimpleNamespace(
        name=name,
        kv_events=KvEventsConfig(endpoint=f"tcp://127.0.0.1:{port}"),
        kv_events_changed=asyncio.Event(),
        attempts=0,
        dialect=dialect("vllm"),
    )

    async def answer(path: str) -> object:
        return None

    return KvSubscriber(
        feeds,
        cast(Target, target),
        router,
        time.monotonic,
        answer=answer,
        is_current=lambda: True,
        deliver=_ignore,
    )


def _ignore(actions: Iterable[Action]) -> None:
    """Take the actions of the Router, which has no requests."""


async def _lateness(seconds: float) -> list[float]:
    """How late a timer of 5 ms is, for so long."""
    late, end_s = [], time.perf_counter() + seconds
    while (began_s := time.perf_counter()) < end_s:
        await asyncio.sleep(0.005)
        late.append(time.perf_counter() - began_s - 0.005)
    return late


def publish() -> None:
    """Publish at free ports, which are printed, until killed."""
    zmq = import_zmq()
    context = zmq.Context()
    sockets = [context.socket(zmq.PUB) for _ in range(REPLICAS)]
    print(*[socket.bind_to_random_port("tcp://127.0.0.1") for socket in sockets], flush=True)
    began_s = time.monotonic()
    for number, payload in enumerate(payloads()):
        for socket in sockets:
            socket.send_multipart([b"", number.to_bytes(8, "big"), payload])
        time.sleep(max(0.0, began_s + (number + 1) / MESSAGES_PER_S - time.monotonic()))


def payloads() -> Iterator[bytes]:
    """Yield the messages of one publisher; from the 51st on each has all its events."""
    numbers = count(1)
    waiting: list[list[int]] = []
    while True:
        events: list[dict[str, object]] = []
        for _ in range(STORED):
            hashes = [next(numbers) * 0x9E3779B97F4A7C15 & (1 << 64) - 1 for _ in range(BLOCKS)]
            tokens = [value % 150_000 for value in hashes for _ in range(BLOCK_TOKENS)]
            waiting.append(hashes)
            events.append(
                {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": None, "token_ids": tokens}
                | {"block_size": BLOCK_TOKENS, "lora_id": None, "medium": "GPU", "lora_name": None, "group_idx": 0}
            )
        while len(waiting) > 100:
            events += [
                {"type": "BlockRemoved", "block_hashes": [value], "medium": "GPU", "group_idx": 0}
                for value in waiting.pop(0)
            ]
        yield encode([time.time(), events, 0])


if __name__ == "__main__":
    publish()
