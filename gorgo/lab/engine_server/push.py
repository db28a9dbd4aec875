"""The reporter of one engine: pushes its cache whole each few seconds, and evictions in batches in between.

Owns the order of pushes, retries and back-off, and the blocks of the cache by own hashes (`CacheMirror`). Evictions are
not repeated: the next whole push makes up for a lost one. Nothing waits in a queue, so a proxy that is away costs no
memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import time_ns

import aiohttp
import numpy as np
from numpy.typing import NDArray

from gorgo.core.backoff import backoff_s
from gorgo.core.prefix.kv_source import chain_hashes
from gorgo.lab.sim.engine.kv_cache import KvObserver

# The blocks of an engine's cache by own hashes, into which the engine's hashes are translated, and those that it has
# evicted since the last push.


class CacheMirror(KvObserver):
    """An observer of one cache (`sim.engine`), whose items are token ids.

    Parameters
    ----------
    block_tokens:
        Tokens of a block.

    Example
    -------
    >>> mirror = CacheMirror(block_tokens=1)
    >>> mirror.stored([10, 11], None, b"aaaabbbb"), mirror.removed([11])
    (None, None)
    >>> mirror.blocks().tolist() == chain_hashes(b"aaaa", block_tokens=1)
    True
    >>> len(mirror.take_evicted()), len(mirror.take_evicted())
    (1, 0)
    """

    def __init__(self, *, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        #: Whether more has changed than evictions describe.
        self.was_cleared = False
        #: Engine's hash -> own hash.
        self._own: dict[int, int] = {}
        #: Engine's hash -> copies beyond the first.
        self._copies: dict[int, int] = {}
        self._evicted: dict[int, None] = {}

    def stored(self, hashes: Sequence[int], parent: int | None, items: bytes) -> None:
        root = 0 if parent is None else self._own.get(parent)
        if root is None:
            return  # Blocks behind an unknown one cannot be named; the router counts them as not cached.
        for engine_hash, own in zip(
            hashes, chain_hashes(items, block_tokens=self.block_tokens, root=root), strict=True
        ):
            if engine_hash in self._own:
                self._copies[engine_hash] = self._copies.get(engine_hash, 0) + 1
            self._own[engine_hash] = own
            self._evicted.pop(own, None)

    def removed(self, hashes: Sequence[int]) -> None:
        for engine_hash in hashes:
            more = self._copies.pop(engine_hash, 0)
            if more > 1:
                self._copies[engine_hash] = more - 1
            elif not more and engine_hash in self._own:
                self._evicted[self._own.pop(engine_hash)] = None

    def cleared(self) -> None:
        self._own.clear()
        self._copies.clear()
        self._evicted.clear()
        self.was_cleared = True

    def blocks(self) -> NDArray[np.uint64]:
        """Return the own hashes of all blocks."""
        return np.fromiter(self._own.values(), dtype=np.uint64, count=len(self._own))

    def take_evicted(self) -> NDArray[np.uint64]:
        """Return the own hashes evicted since the last call."""
        evicted = np.fromiter(self._evicted, dtype=np.uint64, count=len(self._evicted))
        self._evicted.clear()
        return evicted


#: Between two whole pushes, between two batches of evictions, and the least time between two whole pushes, s.
SYNC_S = 5.0
BATCH_S = 0.1
LEAST_SYNC_S = 1.0
#: A push that takes longer is lost, s.
TIMEOUT_S = 5.0
#: First pause after a failed whole push, doubled up to `SYNC_S`, s.
RETRY_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class PushTarget:
    """The proxy, and the engine's name there.

    `url` is the base of the admin listener. `model` is `None` for all models of the replica: those of LoRA adapters.
    """

    url: str
    replica: str
    model: str | None
    token: str


class PushReporter:
    """Pushes of one run of an engine.

    Parameters
    ----------
    mirror:
        The engine's cache.
    notify:
        Called with each new reason why pushes fail, and when they succeed again.
    sync_s, batch_s:
        Intervals.
    """

    def __init__(
        self,
        target: PushTarget,
        mirror: CacheMirror,
        *,
        notify: Callable[[str], None],
        sync_s: float = SYNC_S,
        batch_s: float = BATCH_S,
    ) -> None:
        self._target = target
        self._mirror = mirror
        self._notify = notify
        self._sync_s = sync_s
        self._batch_s = batch_s
        #: A later run has a greater one.
        self._epoch = time_ns()
        self._sequence = 0
        self._failure: str | None = None
        #: Whole pushes that failed in a row.
        self._failures = 0

    async def run(self) -> None:
        """Push until cancelled."""
        now = asyncio.get_running_loop().time
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            synced_s, due_s = -LEAST_SYNC_S, now()
            while True:
                if self._mirror.was_cleared:
                    due_s = min(due_s, synced_s + LEAST_SYNC_S)
                if now() >= due_s:
                    synced_s = now()
                    due_s = synced_s + await self._sync(session)
                else:
                    evicted = self._mirror.take_evicted()
                    if len(evicted) and await self._push(session, "eviction", evicted) == "sync":
                        due_s = min(due_s, synced_s + LEAST_SYNC_S)
                await asyncio.sleep(self._batch_s)

    async def _sync(self, session: aiohttp.ClientSession) -> float:
        """Push the whole cache; return when to do so again."""
        self._mirror.was_cleared = False
        self._mirror.take_evicted()  # They are not in the cache.
        if await self._push(session, "sync", self._mirror.blocks()) is None:
            self._failures += 1
            return backoff_s(self._failures, first_s=RETRY_S, longest_s=self._sync_s)
        self._failures = 0
        return self._sync_s

    async def _push(self, session: aiohttp.ClientSession, route: str, hashes: NDArray[np.uint64]) -> str | None:
        """Push hashes; return `sync` if the proxy asks for the whole cache, `done` otherwise, `None` if it failed."""
        target = self._target
        query = {
            "worker_id": target.replica,
            **({} if target.model is None else {"model": target.model}),
            "block_tokens": str(self._mirror.block_tokens),
            "epoch": str(self._epoch),
            "sequence": str(self._sequence),
        }
        self._sequence += 1
        headers = {"authorization": f"Bearer {target.token}", "content-type": "application/octet-stream"}
        body = hashes.astype("<u8").tobytes()
        try:
            url = f"{target.url.rstrip('/')}/internal/{route}"
            async with session.post(url, params=query, headers=headers, data=body) as answer:
                found = await answer.json()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            self._record(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
            return None
        if answer.status != 200:
            details = found.get("error", {}) if isinstance(found, dict) else {}
            self._record(f"{answer.status} {details.get('code')}: {details.get('message')}")
            return None
        self._record(None)
        return "sync" if isinstance(found, dict) and found.get("sync_needed") else "done"

    def _record(self, failure: str | None) -> None:
        """Notify of a reason other than the last one."""
        if failure != self._failure:
            self._failure = failure
            self._notify(f"pushes fail: {failure}" if failure else "pushes are accepted")
