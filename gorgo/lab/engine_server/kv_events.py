"""KV cache events of a simulated engine over ZeroMQ, in the form of SGLang or vLLM, with replays.

Owns the wire form, the numbers of the messages and the buffer of replays. The cache calls `KvEventLog`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from time import time
from types import ModuleType
from typing import Any

from msgspec import msgpack

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
