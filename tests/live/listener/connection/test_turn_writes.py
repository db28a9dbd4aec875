"""Events of one turn are written at its end: all of them, in the order of each connection, and once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from gorgo.live.listener.connection.transport import TransportOwner
from gorgo.live.listener.connection.turn_writes import FEW_EVENTS, MAX_BYTES, MAX_CONNECTIONS, TurnWrites


class RecordedTransport(asyncio.Transport):
    """Writes and ends of one connection, in their order, in a list that connections share."""

    def __init__(self, name: str, done: list[tuple[str, bytes]]) -> None:
        super().__init__()
        self._name, self._done = name, done
        self._closing = False

    def is_closing(self) -> bool:
        return self._closing

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self._closing, "nothing is written to a closed connection"
        self._done.append((self._name, bytes(data)))

    def close(self) -> None:
        self._end(b"close")

    def abort(self) -> None:
        self._end(b"abort")

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self._done.append((self._name, b"eof"))

    def get_write_buffer_size(self) -> int:
        return 0

    def _end(self, how: bytes) -> None:
        self._closing = True
        self._done.append((self._name, how))


class BusyTurns(TurnWrites):
    """Every turn has many events."""

    def are_many(self, now: float) -> bool:
        return True


class Rig:
    """Connections of one listener."""

    def __init__(self, writes: TurnWrites | None = None) -> None:
        self.writes = writes or BusyTurns()
        self.done: list[tuple[str, bytes]] = []

    def connection(self, name: str = "a") -> TransportOwner:
        made = TransportOwner(self.writes)
        made.connection_made(RecordedTransport(name, self.done))
        return made

    @property
    def written(self) -> bytes:
        return b" ".join(data for _, data in self.done)


async def test_events_of_one_turn_are_written_together_at_its_end() -> None:
    rig = Rig()
    first, second = rig.connection("a"), rig.connection("b")
    first.write_with_others(b"1")
    second.write_with_others(b"2")
    first.write_with_others(b"3")
    assert rig.done == []
    await asyncio.sleep(0)
    assert rig.done == [("a", b"13"), ("b", b"2")]
    second.write_with_others(b"4")
    await asyncio.sleep(0)
    assert rig.done[2:] == [("b", b"4")]


def test_events_are_many_from_a_number_on_until_the_next_turn() -> None:
    writes = TurnWrites()
    turn = [writes.are_many(7.0) for _ in range(FEW_EVENTS + 2)]
    assert turn == [False] * FEW_EVENTS + [True] * 2
    assert not writes.are_many(7.001)


async def test_a_few_events_are_written_in_the_step_in_which_they_came() -> None:
    rig = Rig(TurnWrites())
    connection = rig.connection()
    for _ in range(FEW_EVENTS):
        connection.write_with_others(b"1")
    assert len(rig.done) == FEW_EVENTS


async def test_what_is_written_at_once_comes_behind_what_waits() -> None:
    rig = Rig()
    connection = rig.connection()
    connection.write_with_others(b"1")
    connection.write(b"2")
    connection.write_with_others(b"x" * (MAX_BYTES + 1))
    connection.write_with_others(b"3")
    connection.write_with_others(b"y" * (MAX_BYTES + 1))
    assert [data[:2] for _, data in rig.done] == [b"12", b"xx", b"3y"]
    await asyncio.sleep(0)
    assert len(rig.done) == 3, "each byte is written once"


async def test_events_of_one_connection_wait_up_to_a_bound_in_their_order() -> None:
    rig = Rig()
    connection = rig.connection()
    events = [b"%04d" % number for number in range(MAX_BYTES // 2)]
    for event in events:
        connection.write_with_others(event)
        assert len(connection._waiting) <= MAX_BYTES
    assert [len(data) for _, data in rig.done] == [MAX_BYTES + 4]
    await asyncio.sleep(0)
    assert b"".join(data for _, data in rig.done) == b"".join(events)


async def test_so_many_connections_wait_and_no_more() -> None:
    rig = Rig()
    for number in range(MAX_CONNECTIONS):
        assert rig.done == []
        rig.connection(str(number)).write_with_others(b"1")
    assert len(rig.done) == MAX_CONNECTIONS
    rig.connection("last").write_with_others(b"1")
    assert len(rig.done) == MAX_CONNECTIONS
    await asyncio.sleep(0)
    assert rig.done[-1] == ("last", b"1")


@pytest.mark.parametrize(
    ("end", "written"),
    [
        (TransportOwner.close, b"1 close"),
        (TransportOwner.end_writing, b"1 eof"),
        (TransportOwner.abort_transport, b"abort"),
    ],
)
async def test_an_orderly_end_comes_behind_what_waits_and_an_abort_drops_it(
    end: Callable[[TransportOwner], None], written: bytes
) -> None:
    rig = Rig()
    connection = rig.connection()
    connection.write_with_others(b"1")
    end(connection)
    await asyncio.sleep(0)
    assert rig.written == written


async def test_a_connection_that_is_lost_in_between_keeps_none_of_the_others() -> None:
    rig = Rig()
    lost, other = rig.connection("a"), rig.connection("b")
    lost.write_with_others(b"1")
    other.write_with_others(b"2")
    lost.connection_lost(None)
    await asyncio.sleep(0)
    assert rig.done == [("b", b"2")]
