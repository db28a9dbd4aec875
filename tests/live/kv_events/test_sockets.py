"""A receiver of real sockets: every message in order, and no work while none is wanted."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from gorgo.live.kv_events import sockets
from gorgo.live.kv_events.sockets import Arrivals, Backlog, Backlogs, MessageRefusedError, Receiver, Turn, import_zmq
from tests.live.kv_events.feeding import needs_zmq, until

pytestmark = needs_zmq
ON_BOTH_LOOPS = True


class Taker:
    """Takes all messages but the slow ones, if it has a list for them."""

    def __init__(self, taken: list[list[bytes]] | None) -> None:
        self._taken = taken
        self._begun: list[list[bytes]] = []

    def take_message(self, frames: list[bytes]) -> bool:
        if self._taken is None or frames[-1] == b"slow":
            return False
        assert not self._begun
        self._begun.append(frames)
        return True

    def finish_message(self) -> bool:
        if self._taken is None or not self._begun:
            return False
        self._taken.append(self._begun.pop())
        return True


class Failing(Taker):
    """Fails at the rest of a message."""

    def __init__(self) -> None:
        super().__init__([])

    def finish_message(self) -> bool:
        return bool(self._begun[0][7]) if self._begun else False


@contextmanager
def pair(*, taken: list[list[bytes]] | None = None) -> Iterator[tuple[Any, Receiver]]:
    """A socket to send on, and the receiver of the other end; it takes messages into `taken`."""
    zmq = import_zmq()
    context = zmq.asyncio.Context()
    sender, receiving = zmq.Context.shadow(context.underlying).socket(zmq.PUSH), context.socket(zmq.PULL)
    sender.connect(f"tcp://127.0.0.1:{receiving.bind_to_random_port('tcp://127.0.0.1')}")

    receiver = Receiver(zmq, receiving, Arrivals(), Turn(), taker=Taker(taken))
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
                assert await receiver.next_message() == [b"topic", b"%d" % number]
            sent += burst


async def test_a_message_of_many_frames_is_refused_at_its_first() -> None:
    """A list of six million frames took the event loop for 18 s."""
    with pair() as (sender, receiver):
        sender.send_multipart([b"a", b"b", b"c", b"d"])
        assert await receiver.next_message() == [b"a", b"b", b"c", b"d"]
        sender.send_multipart([b"x"] * 1000)
        with pytest.raises(MessageRefusedError, match="more than 4 frames"):
            await receiver.next_message()


async def test_messages_that_are_taken_stay_in_order_with_those_that_are_not() -> None:
    taken: list[list[bytes]] = []
    with pair(taken=taken) as (sender, receiver):
        for burst in (3, 200, 1):
            for number in range(burst):
                sender.send_multipart([b"%d" % number])
            sender.send_multipart([b"slow"])
            assert await asyncio.wait_for(receiver.next_message(), timeout=10) == [b"slow"]
            assert taken == [[b"%d" % number] for number in range(burst)]
            taken.clear()


async def test_what_fails_while_a_message_is_taken_is_the_receivers() -> None:
    with pair() as (sender, receiver):
        receiver._taker = Failing()
        sender.send_multipart([b"first"])
        with pytest.raises(IndexError):
            await asyncio.wait_for(receiver.next_message(), timeout=10)
        receiver._taker = Taker(None)
        sender.send_multipart([b"second"])
        assert await asyncio.wait_for(receiver.next_message(), timeout=10) == [b"second"]


async def test_a_message_that_waits_while_another_is_handled_does_not_occupy_the_loop() -> None:
    with pair() as (sender, receiver), counted(receiver, "_on_change") as calls:
        for text in (b"first", b"second"):
            waiting = asyncio.create_task(receiver.next_message())
            await asyncio.sleep(0.01)
            sender.send_multipart([text])
            assert await waiting == [text]
        calls.clear()
        sender.send_multipart([b"third"])
        for _ in range(50):
            await asyncio.sleep(0.001)
        assert len(calls) <= 2
        assert await receiver.next_message() == [b"third"]


async def test_a_socket_with_many_messages_is_looked_at_and_a_quiet_one_is_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sockets, "MIN_GATHER_S", 0.001)
    taken: list[list[bytes]] = []
    with pair(taken=taken) as (sender, receiver), counted(receiver, "_poll") as looks:
        waiting = asyncio.create_task(receiver.next_message())
        await until(lambda: receiver._is_watched)
        # Each at once: the next request may be for what this message evicts.
        for number in range(1, 6):
            sender.send_multipart([b"few"])
            await until(lambda: len(taken) == number)  # noqa: B023 - awaited
        assert receiver._is_watched
        assert not looks
        taken.clear()
        receiver._arrivals._wakes = -1000.0  # the rate is used up
        sender.send_multipart([b"many"])
        await until(lambda: len(taken) == 1)
        assert looks
        await until(lambda: receiver._is_watched)
        looks.clear()
        await asyncio.sleep(0.01)
        assert not looks
        waiting.cancel()


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


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's count of received bytes is Linux's")
def test_what_has_come_and_was_not_delivered_waits_and_all_sockets_share_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sockets, "MAX_ALL_BYTES", 150_000)
    every = Backlogs()
    with ExitStack() as stack:
        pairs = [tuple(map(stack.enter_context, tcp_pair())) for _ in range(2)]
        first, second = (Backlog(120_000, every) for _ in pairs)
        for backlog, (_, receiving) in zip((first, second), pairs, strict=True):
            backlog.connection_opened(receiving.fileno())
            backlog.check()
        (sender, receiving), (other, _) = pairs
        sender.sendall(bytes(100_000))
        receiving.recv(100_000, socket.MSG_WAITALL)
        first.check()
        assert 99_000 < first.bytes <= 100_000
        first.count_delivered([b"x" * 40_000, b"", b"y" * 9_900])
        first.check()
        assert 49_000 < first.bytes < 51_000
        other.sendall(bytes(110_000))
        pairs[1][1].recv(110_000, socket.MSG_WAITALL)
        with pytest.raises(MessageRefusedError, match="in all subscriptions"):
            second.check()
        first.check()
        second.connection_closed(pairs[1][1].fileno())
        second.check()
        assert second.bytes == 0
        sender.sendall(bytes(80_000))
        receiving.recv(80_000, socket.MSG_WAITALL)
        with pytest.raises(MessageRefusedError, match="expected at most 120000"):
            first.check()
        first.close()
        second.close()
    assert not every


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's count of received bytes is Linux's")
def test_frames_that_take_many_times_their_bytes_in_memory_are_refused_and_long_ones_are_not() -> None:
    """ZeroMQ takes 64 bytes for two of the network: 20 MiB that wait were 400 MB."""
    resident = [10**9]
    every = Backlogs(lambda: resident[0])
    with ExitStack() as stack:
        sender, receiving = map(stack.enter_context, tcp_pair())
        first, quiet = Backlog(sockets.MAX_LIVE_BYTES, every), Backlog(sockets.MAX_LIVE_BYTES, every)
        first.connection_opened(receiving.fileno())
        for _ in range(4):
            sender.sendall(bytes(500_000))
            receiving.recv(500_000, socket.MSG_WAITALL)
        first.check()
        resident[0] += 2_000_000 + sockets.MAX_GROWTH_BYTES  # as long frames, and what others took meanwhile
        first.check()
        resident[0] += 2_000_001
        quiet.check()
        with pytest.raises(MessageRefusedError, match="bytes that wait or have no end took"):
            first.check()
        # Of what was taken before nothing is counted again.
        first.connection_closed(receiving.fileno())
        first.check()
        quiet.check()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        sender = socket.create_connection(listening.getsockname())
        receiving, _ = listening.accept()
    return sender, receiving
