"""Processor time of a proxy's subscriptions at two million KV events a minute, from eight publishers over sockets.

Target: under 10 % of one, beyond what the process takes without events (a timer of 5 ms). `process_time` has the
threads of ZeroMQ and, of the helper processes, nothing: none is started for messages of this size.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import cast

import numpy as np
import uvloop

from gorgo.cli.launch import freeze_startup_objects
from gorgo.config.fleet import KvEventsConfig
from gorgo.core.fleet.replica import ReplicaSpec
from gorgo.core.messages.actions import Action
from gorgo.core.router import Router
from gorgo.engines.registry import dialect
from gorgo.live.extras import EVENTS, is_installed
from gorgo.live.kv_events.subscriber import KvSubscriber, KvSubscriptions
from gorgo.live.upstream.target import Target
from gorgo.policies.registry import make_policy
from tests.bench.kv_publishers import REPLICAS, TOPIC, Publishers, publishers

SECONDS, IDLE_SECONDS = 10.0, 4.0


def run() -> None:
    """Print the share of a processor, for a subscriber of eight replicas."""
    if not is_installed(EVENTS):
        print("pyzmq is not installed (extra `events`)")
        return
    freeze_startup_objects()  # as the command line does
    with publishers() as running:
        uvloop.run(_measure(running))


async def _measure(running: Publishers) -> None:
    names = [f"r{number}" for number in range(REPLICAS)]
    specs = [ReplicaSpec(name, "here") for name in names]
    router = Router(specs, make_policy("gorgo-ms"), rng=np.random.default_rng(0), boot_id="bench")
    feeds = KvSubscriptions()
    tasks = [
        asyncio.create_task(make_subscriber(feeds, router, *pair).run())
        for pair in zip(names, running.ports, strict=True)
    ]
    await asyncio.sleep(1.0)
    wall_s, processor_s = time.perf_counter(), time.process_time()
    await _lateness(IDLE_SECONDS)
    idle = (time.process_time() - processor_s) / (time.perf_counter() - wall_s)
    running.switch(on=True)
    await asyncio.sleep(2.0)
    stats = list(feeds.stats.values())
    events, messages = sum(each.events for each in stats), sum(each.messages for each in stats)
    wall_s, processor_s = time.perf_counter(), time.process_time()
    lateness = await _lateness(SECONDS)
    wall_s, processor_s = time.perf_counter() - wall_s, time.process_time() - processor_s
    events, messages = sum(each.events for each in stats) - events, sum(each.messages for each in stats) - messages
    states = sorted({each.state.value for each in stats})
    print(f"{events / wall_s * 60 / 1e6:.2f} M events a minute in {messages / wall_s:.0f} messages a second, {states}")
    share = processor_s / wall_s - idle
    event_us = share * wall_s / max(events, 1) * 1e6
    print(f"{share:.1%} of a processor beside {idle:.1%} without events, {event_us:.2f} us an event")
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
        kv_events=KvEventsConfig(endpoint=f"tcp://127.0.0.1:{port}", topic=TOPIC),
        kv_events_changed=asyncio.Event(),
        attempts=0,
        dialect=dialect("vllm"),
    )

    async def answer(path: str) -> object:
        return None

    return KvSubscriber(
        feeds,
        cast(Target, target),
        router.caches,
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
