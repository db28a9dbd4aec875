"""A receiver of real sockets: every message in order, and no work while none is wanted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
    with pair() as (sender, receiver):
        sender.send_multipart([b"first"])
        assert await receiver.receive() == [b"first"]
        calls, reported = 0, receiver._on_change

        def count() -> None:
            nonlocal calls
            calls += 1
            reported()

        receiver._on_change = count  # type: ignore[method-assign]
        receiver.close()
        waiting = asyncio.create_task(receiver.receive())
        await asyncio.sleep(0.01)
        sender.send_multipart([b"second"])
        assert await waiting == [b"second"]
        sender.send_multipart([b"third"])
        for _ in range(50):
            await asyncio.sleep(0.001)
        assert 1 <= calls <= 2
        assert await receiver.receive() == [b"third"]
