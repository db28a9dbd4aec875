"""In a busy loop a request waits for the next turn: it is written once, or not at all if its connection ends before."""

from __future__ import annotations

import asyncio

import pytest

from gorgo.live.event_loop import BUSY_WRITES, writes_of
from gorgo.live.upstream.connection import WRITE_BYTES, ReplicaConnection
from gorgo.live.upstream.response import HttpResponse
from tests.live.test_turn_writes import RecordedTransport

HEAD = b"POST / HTTP/1.1\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


class Rig:
    """A connection in a loop that has just become busy, and what becomes of it."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(BUSY_WRITES):
            writes_of(loop).are_many(loop.time())
        self.done: list[tuple[str, bytes]] = []
        self.idle: list[ReplicaConnection] = []
        self.connection = ReplicaConnection(self.idle.append, lambda _: None)
        self.connection.connection_made(RecordedTransport("replica", self.done))
        self.response = HttpResponse(self.connection, head_only=False)

    def send(self, body: bytes = b"body") -> None:
        self.connection.write_request(HEAD, body, self.response)

    @property
    def written(self) -> bytes:
        return b"".join(data for _, data in self.done)


@pytest.mark.parametrize("size", [4, 100_000, WRITE_BYTES])
async def test_a_request_is_written_in_the_next_turn(size: int) -> None:
    rig = Rig()
    rig.send(b"x" * size)
    assert rig.written == b""
    await asyncio.sleep(0)
    assert rig.written == HEAD + b"x" * size
    await asyncio.sleep(0)
    assert len(rig.written) == len(HEAD) + size, "once"


async def test_a_request_above_the_bound_of_one_write_does_not_wait() -> None:
    rig = Rig()
    rig.send(b"x" * (WRITE_BYTES + 1))
    assert rig.written == HEAD + b"x" * WRITE_BYTES
    rig.connection.close()


async def test_a_request_that_is_cancelled_before_the_turn_is_never_written() -> None:
    rig = Rig()
    rig.send()
    await rig.response.aclose()
    await asyncio.sleep(0)
    assert rig.written == b"abort"


async def test_a_connection_lost_before_the_turn_fails_its_request_and_nothing_is_written() -> None:
    rig = Rig()
    rig.send()
    rig.connection.connection_lost(ConnectionResetError())
    await asyncio.sleep(0)
    assert rig.written == b""
    assert not rig.response.received, "so the pool repeats it"


async def test_a_connection_whose_answer_came_before_its_request_carries_no_other() -> None:
    rig = Rig()
    rig.send()
    rig.connection.data_received(OK)
    await rig.response.read_head()
    await rig.response.aclose()
    await asyncio.sleep(0)
    assert (rig.written, rig.idle) == (b"abort", [])
