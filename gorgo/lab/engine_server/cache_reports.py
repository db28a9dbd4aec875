"""What a simulated engine reports of its KV cache: events over ZeroMQ, and pushes to a proxy.

Owns the wire form of SGLang's and vLLM's events, the numbers of the messages and the buffer of replays; and the order
of pushes, their retries and back-off. An engine pushes its cache whole each few seconds, and evictions in batches in
between. Evictions are not repeated: the next whole push makes up for a lost one. Nothing waits in a queue, so a proxy
that is away costs no memory. The cache calls `KvEventLog` and `CacheMirror`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import time, time_ns
from types import ModuleType
from typing import Any

import aiohttp
import numpy as np
from msgspec import msgpack
from numpy.typing import NDArray

from gorgo.core.backoff import backoff_s
from gorgo.core.prefix.kv_source import chain_hashes
from gorgo.errors import ConfigError
from gorgo.lab.sim.engine.kv_cache import KvObserver
from gorgo.live.kv_events.sockets import import_zmq

#: Messages retained for replays, as in SGLang and vLLM.
BUFFERED = 10_000
_NUMBER_BYTES = 8
_END = b"\xff" * _NUMBER_BYTES
TOPIC = "kv-events"
_ITEM_BYTES = 4


class KvEventLog(KvObserver):
    """Events of a cache since the last message, in the engine's form. An observer of the cache (`sim.engine`).

    Parameters
    ----------
    block_tokens:
        Tokens of a block.
    vllm:
        Whether hashes are unsigned, as vLLM's are, or signed.
    """

    def __init__(self, *, block_tokens: int, vllm: bool) -> None:
        self._block_tokens = block_tokens
        self._vllm = vllm
        #: Set while there are events.
        self.changed = asyncio.Event()
        self._events: list[dict[str, Any]] = []

    def stored(self, hashes: Sequence[int], parent: int | None, items: bytes) -> None:
        event: dict[str, Any] = {
            "type": "BlockStored",
            "block_hashes": self._hashes(hashes),
            "parent_block_hash": None if parent is None else self._hashes([parent])[0],
            "token_ids": list(memoryview(items).cast("I")),
            "block_size": self._block_tokens,
            "lora_id": None,
            "medium": "GPU",
        }
        if self._vllm:
            event |= {"lora_name": None, "extra_keys": [None] * len(hashes), "group_idx": 0}
        self._add(event)

    def removed(self, hashes: Sequence[int]) -> None:
        event: dict[str, Any] = {"type": "BlockRemoved", "block_hashes": self._hashes(hashes), "medium": "GPU"}
        self._add(event | ({"group_idx": 0} if self._vllm else {}))

    def cleared(self) -> None:
        self._add({"type": "AllBlocksCleared"})

    def take_message(self) -> bytes:
        """Return the message of all events since the last one."""
        events, self._events = self._events, []
        self.changed.clear()
        return msgpack.encode([time(), events, 0])

    def _add(self, event: dict[str, Any]) -> None:
        self._events.append(event)
        self.changed.set()

    def _hashes(self, hashes: Sequence[int]) -> list[int]:
        return [value & (1 << 64) - 1 for value in hashes] if self._vllm else list(hashes)


class KvEventPublisher:
    """The two sockets of an engine: events, and replays of the last ones.

    Parameters
    ----------
    zmq:
        The package.
    endpoint, replay:
        Addresses to bind; a port of 0 takes a free one.
    topic_in_replays:
        Whether replies have the frame of the topic, as those of newer engines do.
    """

    def __init__(
        self, zmq: ModuleType, endpoint: str, replay: str | None, *, topic_in_replays: bool, buffered: int = BUFFERED
    ) -> None:
        self._context = zmq.asyncio.Context()
        self._zmq = zmq
        try:
            self._events = self._bound(zmq.PUB, endpoint)
            self._replays = None if replay is None else self._bound(zmq.ROUTER, replay)
        except zmq.ZMQError:
            self.close()
            raise
        self.endpoint: str = self._events.get_string(zmq.LAST_ENDPOINT)
        self.replay: str | None = None if self._replays is None else self._replays.get_string(zmq.LAST_ENDPOINT)
        self._topic_in_replays = topic_in_replays
        self._buffer: deque[tuple[bytes, bytes]] = deque(maxlen=buffered)
        self.next_number = 0

    async def publish(self, payload: bytes) -> None:
        """Send a message and retain it."""
        number = self.next_number.to_bytes(_NUMBER_BYTES, "big")
        self.next_number += 1
        self._buffer.append((number, payload))
        await self._events.send_multipart([TOPIC.encode(), number, payload])

    async def send_all(self, log: KvEventLog, travel_s: Callable[[], float]) -> None:
        """Publish the events of a cache until cancelled: a message per step of the engine, which takes its trip."""
        loop = asyncio.get_running_loop()
        arrives_s = 0.0
        pending: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=BUFFERED)

        async def deliver() -> None:
            while True:
                due_s, payload = await pending.get()
                await asyncio.sleep(due_s - loop.time())
                await self.publish(payload)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.serve_replays())
            tasks.create_task(deliver())
            while True:
                # Set within a step of the engine, which ends before this task goes on.
                await log.changed.wait()
                arrives_s = max(arrives_s, loop.time() + travel_s())
                await pending.put((arrives_s, log.take_message()))

    async def serve_replays(self) -> None:
        """Answer requests for replays until cancelled."""
        if self._replays is None:
            return
        while True:
            client, *_, start = await self._replays.recv_multipart()
            topic = [TOPIC.encode()] if self._topic_in_replays else []
            for number, payload in list(self._buffer):
                if number >= start:
                    await self._replays.send_multipart([client, b"", *topic, number, payload])
            await self._replays.send_multipart([client, b"", *([b""] if topic else []), _END, b""])

    @property
    def ports(self) -> tuple[int, int | None]:
        """Return the ports of events and replays."""
        return _port(self.endpoint), None if self.replay is None else _port(self.replay)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _bound(self, kind: int, endpoint: str) -> Any:
        socket = self._context.socket(kind)
        socket.setsockopt(self._zmq.LINGER, 0)
        socket.setsockopt(self._zmq.IPV6, 1 if "[" in endpoint else 0)
        socket.setsockopt(self._zmq.SNDHWM, 100_000)
        socket.bind(endpoint)
        return socket


@asynccontextmanager
async def publishing(
    endpoint: str, events: KvEventLog, *, vllm: bool, travel_s: Callable[[], float]
) -> AsyncIterator[KvEventPublisher]:
    """Publish the changes of a cache that `events` observes at `endpoint`, and replays at the next port.

    Raises `ConfigError` if a port is taken, `MissingExtra` without the extra `events`.
    """
    zmq = import_zmq()
    try:
        publisher = KvEventPublisher(zmq, endpoint, next_port(endpoint), topic_in_replays=vllm)
    except zmq.ZMQError as error:
        raise ConfigError(f"--kv-events: {endpoint} and the next port: {error}; expected free ports") from error
    sending = asyncio.create_task(publisher.send_all(events, travel_s))
    try:
        yield publisher
    finally:
        sending.cancel()
        await asyncio.wait((sending,))
        publisher.close()


def next_port(endpoint: str) -> str:
    """Return the address of the next port; of any free one, if the port is 0.

    >>> next_port("tcp://127.0.0.1:5557"), next_port("tcp://127.0.0.1:0")
    ('tcp://127.0.0.1:5558', 'tcp://127.0.0.1:0')
    """
    host, port = endpoint.rpartition(":")[0], _port(endpoint)
    return f"{host}:{port + 1 if port else 0}"


def _port(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


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
        for engine_hash, own_hash in zip(
            hashes, chain_hashes(items, block_tokens=self.block_tokens, root=root), strict=True
        ):
            if engine_hash in self._own:
                self._copies[engine_hash] = self._copies.get(engine_hash, 0) + 1
            self._own[engine_hash] = own_hash
            self._evicted.pop(own_hash, None)

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
                reply = await answer.json()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            self._record(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
            return None
        if answer.status != 200:
            details = reply.get("error", {}) if isinstance(reply, dict) else {}
            self._record(f"{answer.status} {details.get('code')}: {details.get('message')}")
            return None
        self._record(None)
        return "sync" if isinstance(reply, dict) and reply.get("sync_needed") else "done"

    def _record(self, failure: str | None) -> None:
        """Notify of a reason other than the last one."""
        if failure != self._failure:
            self._failure = failure
            self._notify(f"pushes fail: {failure}" if failure else "pushes are accepted")
