"""Processor time that pushes of a million hashes take of one turn of the event loop: the first one, and later ones.

Target: no turn above 5 ms. Times are those of the loop's thread, so other processes of the machine hardly change them.
The proxy is a `PushService` with a Router; bodies are not read from a socket.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from gorgo.core.fleet.replica import ReplicaSpec
from gorgo.core.limits import RouterLimits
from gorgo.core.messages.actions import Action
from gorgo.core.router import Router
from gorgo.live.cache_push import CachePush, PushService, PushSource
from gorgo.live.event_loop import RouterGateway
from gorgo.policies.registry import make_policy

HASHES = 1_000_000
#: Share of a cache that is another one at the next push.
CHANGED = 0.01
#: Bound of the Router in the rows "beyond the bound".
SMALL_BOUND = 800_000


def run() -> None:
    """Print the time of each push, and of its longest turns."""
    print(f"{'push of ' + format(HASHES, ','):<28}  {'ms in all':>9}  {'turns':>6}  {'p99 ms':>7}  {'longest ms':>10}")
    asyncio.run(_measure("", 4_000_000))
    asyncio.run(_measure(", beyond the bound", SMALL_BOUND))


async def _measure(label: str, bound: int) -> None:
    router = Router(
        [ReplicaSpec("r", "here")],
        make_policy("gorgo-ms"),
        rng=np.random.default_rng(0),
        boot_id="bench",
        limits=RouterLimits(max_index_blocks=bound),
    )
    service = PushService(router, cast(RouterGateway, SimpleNamespace(apply=_ignore)), time.monotonic)
    source, rng = PushSource(), np.random.default_rng(1)
    hashes = rng.integers(0, 1 << 64, HASHES, dtype=np.uint64)
    await _print(f"first{label}", service.sync(source, _push(0, hashes)))
    hashes[: int(CHANGED * HASHES)] = rng.integers(0, 1 << 64, int(CHANGED * HASHES), dtype=np.uint64)
    await _print(f"1 % changed{label}", service.sync(source, _push(1, hashes)))
    await _print(f"another run{label}", service.sync(source, _push(2, hashes, epoch=1)))
    router.check()


async def _print(name: str, work: Coroutine[Any, Any, None]) -> None:
    """Await some work; print its turns. One more task runs in every turn and reads the clock."""
    turns: list[float] = []

    async def watch() -> None:
        before_s = time.thread_time()
        while True:
            await asyncio.sleep(0)
            now_s = time.thread_time()
            turns.append((now_s - before_s) * 1e3)
            before_s = now_s

    watching = asyncio.create_task(watch())
    await work
    watching.cancel()
    await asyncio.wait((watching,))
    # Turns in which a thread computes and nothing else happens take some microseconds.
    busy = [turn for turn in turns if turn > 0.05]
    print(f"{name:<28}  {sum(busy):>9.0f}  {len(busy):>6}  {np.quantile(busy, 0.99):>7.2f}  {max(busy):>10.2f}")


def _push(sequence: int, hashes: NDArray[np.uint64], *, epoch: int = 0) -> CachePush:
    return CachePush("r", None, 16, epoch, sequence, hashes.copy())


def _ignore(actions: Iterable[Action]) -> None:
    """Take the actions of the Router, which has no requests."""
