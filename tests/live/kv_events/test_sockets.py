"""A receiver of real sockets: every message in order, and no work while none is wanted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from gorgo.live.kv_events import turns
from gorgo.live.kv_events.extra import import_zmq
from gorgo.live.kv_events.sockets import Receiver
from gorgo.live.kv_events.turns import Arrivals
from tests.live.kv_events.extra import needs_zmq

pytestmark = needs_zmq
ON_BOTH_LOOPS = True


@contextmanager
def pair() -> Iterator[tuple[Any, Receiver]]:
    """A socket to send on, and the receiver of the other end."""
    zmq = import_zmq()
    context = zmq.asyncio.Context()
    sender, receiving = zmq.Context.shadow(context.underlying).socket(zmq.PUSH), context.socket(zmq.PULL)
    sender.connect(f"tcp://127.0.0.1:{receiving.bind_to_random_port('tcp://127.0.0.1')}")
    receiver = Receiver(zmq, receiving, Arrivals())
    try:
        yield sender, receiver
    finally:
        receiver.close()
        sender.close(linger=0)
        context.destroy(linger=0)


async def test_messages_come_in_order_one_by_one_and_in_bursts() -> None:
    with pair() as (sender, receiver):
        sent = 0
        for burst in (1, 300, 1, 1, 7):
            for number in range(sent, sent + burst):
                sender.send_multipart([b"topic", b"%d" % number])
            for number in range(sent, sent + burst):
                assert await receiver.receive() == [b"topic", b"%d" % number]
            sent += burst


async def test_a_message_that_waits_while_another_is_handled_does_not_occupy_the_loop() -> None:
    with pair() as (sender, receiver), counted(receiver, "_on_change") as calls:
        for text in (b"first", b"second"):
            waiting = asyncio.create_task(receiver.receive())
            await asyncio.sleep(0.01)
            sender.send_multipart([text])
            assert await waiting == [text]
        sender.send_multipart([b"third"])
        for _ in range(50):
            await asyncio.sleep(0.001)
        assert len(calls) <= 2
        assert await receiver.receive() == [b"third"]


async def test_a_socket_in_use_is_looked_at_and_a_quiet_one_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "MIN_GATHER_S", 0.001)
    with pair() as (sender, receiver), counted(receiver, "_poll") as looks:
        for number in range(3):
            waiting = asyncio.create_task(receiver.receive())
            while looks or not receiver._is_watched:
                looks.clear()
                await asyncio.sleep(0.02)
            sender.send_multipart([b"%d" % number])
            assert await asyncio.wait_for(waiting, timeout=10) == [b"%d" % number]
            assert looks
            assert not receiver._is_watched
        receiver.close()
        await asyncio.sleep(0.01)
        looks.clear()
        await asyncio.sleep(0.01)
        assert not looks


@contextmanager
def counted(receiver: Receiver, name: str) -> Iterator[list[object]]:
    """The results of each call of a method."""
    results: list[object] = []
    method = getattr(receiver, name)

    def call() -> object:
        results.append(method())
        return results[-1]

    setattr(receiver, name, call)
    yield results
