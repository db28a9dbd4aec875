"""The event loop: writes of one turn together, and a collector that looks rarely."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator

import pytest

from gorgo.cli.launch import FULL_RUNS, MIDDLE_RUNS, YOUNG_OBJECTS
from gorgo.live.event_loop import BUSY_WRITES, MAX_CONNECTIONS, WINDOW_S, TurnWrites, writes_of
from gorgo.live.listener.connection.cycle import MAX_JOINED_BYTES, ClientTransport
from tests.proxy.conftest import Running, Start, until
from tests.proxy.fakes import DONE, Script, answer, chat, delta, hang, reset_after, stream
from tests.proxy.raw import connected

# --- A busy loop writes what was made in one turn in the next: all of it, in the order of each connection, and once.


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

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(list_of_data))

    def write_eof(self) -> None:
        self._done.append((self._name, b"eof"))

    def get_write_buffer_size(self) -> int:
        return 0

    def _end(self, how: bytes) -> None:
        self._closing = True
        self._done.append((self._name, how))


class BusyTurns(TurnWrites):
    """Each write waits."""

    def are_many(self, now: float) -> bool:
        return True


class Rig:
    """Connections of one event loop."""

    def __init__(self, writes: TurnWrites | None = None) -> None:
        self.writes = writes or BusyTurns()
        self.done: list[tuple[str, bytes]] = []

    def connection(self, name: str = "a") -> ClientTransport:
        made = ClientTransport(self.writes)
        made.connection_made(RecordedTransport(name, self.done))
        return made

    @property
    def written(self) -> bytes:
        return b" ".join(data for _, data in self.done)


async def test_events_of_one_turn_are_written_together_at_its_end() -> None:
    rig = Rig()
    first, second = rig.connection("a"), rig.connection("b")
    first.write(b"1")
    second.write(b"2")
    first.write(b"3")
    assert rig.done == []
    await asyncio.sleep(0)
    assert rig.done == [("a", b"13"), ("b", b"2")]
    second.write(b"4")
    await asyncio.sleep(0)
    assert rig.done[2:] == [("b", b"4")]


def test_writes_are_many_from_a_number_in_a_window_on_and_in_the_window_after_it() -> None:
    writes = TurnWrites()
    first = [writes.are_many(7.0 + each / 1e5) for each in range(BUSY_WRITES + 2)]
    assert first == [False] * (BUSY_WRITES - 1) + [True] * 3
    assert writes.are_many(7.0 + WINDOW_S), "the window before it had many"
    assert not writes.are_many(7.001 + 2 * WINDOW_S), "that one had a single write"


def test_a_pause_ends_the_time_in_which_writes_are_many() -> None:
    writes = TurnWrites()
    assert [writes.are_many(7.0) for _ in range(BUSY_WRITES)][-1]
    assert not writes.are_many(7.0 + 3 * WINDOW_S)


async def test_a_loop_with_few_writes_does_each_in_the_step_in_which_it_was_made() -> None:
    rig = Rig(TurnWrites())
    connection = rig.connection()
    for _ in range(BUSY_WRITES - 1):
        connection.write(b"1")
    assert len(rig.done) == BUSY_WRITES - 1


async def test_connections_of_one_loop_share_their_writes() -> None:
    loop = asyncio.get_running_loop()
    assert writes_of(loop) is writes_of(loop)
    other = asyncio.new_event_loop()
    assert writes_of(other) is not writes_of(loop)
    other.close()


async def test_what_is_too_long_to_wait_is_written_at_once_behind_what_waits() -> None:
    rig = Rig()
    connection = rig.connection()
    connection.write(b"1")
    connection.write(b"2")
    connection.write(b"x" * MAX_JOINED_BYTES)
    connection.write(b"y" * 65537)
    connection.write(b"3")
    assert [data[:3] for _, data in rig.done] == [b"12x", b"yyy"]
    await asyncio.sleep(0)
    assert [data[:1] for _, data in rig.done] == [b"1", b"y", b"3"], "each byte is written once"


async def test_events_of_one_connection_wait_up_to_a_bound_in_their_order() -> None:
    rig = Rig()
    connection = rig.connection()
    events = [b"%04d" % number for number in range(MAX_JOINED_BYTES // 2)]
    for event in events:
        connection.write(event)
        assert len(connection._waiting) <= MAX_JOINED_BYTES
    assert [len(data) for _, data in rig.done] == [MAX_JOINED_BYTES + 4]
    await asyncio.sleep(0)
    assert b"".join(data for _, data in rig.done) == b"".join(events)


async def test_so_many_connections_wait_and_no_more() -> None:
    rig = Rig()
    for number in range(MAX_CONNECTIONS):
        assert rig.done == []
        rig.connection(str(number)).write(b"1")
    assert len(rig.done) == MAX_CONNECTIONS
    rig.connection("last").write(b"1")
    assert len(rig.done) == MAX_CONNECTIONS
    await asyncio.sleep(0)
    assert rig.done[-1] == ("last", b"1")


@pytest.mark.parametrize(
    ("end", "written"),
    [
        (ClientTransport.close, b"1 close"),
        (ClientTransport.end_writing, b"1 eof"),
        (ClientTransport.abort_transport, b"abort"),
    ],
)
async def test_an_orderly_end_comes_behind_what_waits_and_an_abort_drops_it(
    end: Callable[[ClientTransport], None], written: bytes
) -> None:
    rig = Rig()
    connection = rig.connection()
    connection.write(b"1")
    end(connection)
    await asyncio.sleep(0)
    assert rig.written == written


async def test_a_connection_that_is_lost_in_between_keeps_none_of_the_others() -> None:
    rig = Rig()
    lost, other = rig.connection("a"), rig.connection("b")
    lost.write(b"1")
    other.write(b"2")
    lost.connection_lost()
    await asyncio.sleep(0)
    assert rig.done == [("b", b"2")]


# --- The collector may look rarely, because nothing large waits for it.


CHAT = "/v1/chat/completions"
LARGE = 300_000
BODY = chat(stream=True, messages=[{"role": "user", "content": "x" * LARGE}])
ANSWER = delta("y" * LARGE)


@pytest.fixture
def cycles() -> Iterator[list[object]]:
    """No garbage is collected during the test; what there is then is kept in this list by the next `gc.collect`."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    yield gc.garbage
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


@pytest.mark.parametrize(
    "scripts",
    [
        pytest.param([[stream(ANSWER, DONE)]], id="a stream"),
        pytest.param([[answer(200, ANSWER)]], id="a whole answer"),
        pytest.param([[answer(500)], [stream(ANSWER, DONE)]], id="a failover"),
        pytest.param([[reset_after(ANSWER)]], id="an answer that breaks off"),
        pytest.param([[answer(503)]], id="a refusal"),
    ],
)
async def test_no_body_is_left_to_the_collector(
    start: Start, scripts: list[list[Script]], cycles: list[object]
) -> None:
    fleet = await start.fleet(*scripts)
    for _ in range(3):
        async with connected(fleet.addresses.data) as client:
            await client.post(CHAT, BODY, "connection: close")
            assert await client.rest()
    await expect_nothing_large(fleet, cycles)


async def test_no_body_of_a_client_that_left_is_left_to_the_collector(start: Start, cycles: list[object]) -> None:
    fleet = await start.fleet([hang(ANSWER)])
    for _ in range(3):
        fleet.replicas[0].dropped.clear()
        async with connected(fleet.addresses.data) as client:
            await client.post(CHAT, BODY)
            await client.head()
            client.reset()
            await until(fleet.replicas[0].dropped.is_set)
    await expect_nothing_large(fleet, cycles)


def test_what_is_there_at_the_start_is_frozen_and_the_collector_runs_from_then_on() -> None:
    """In a process of its own: the setting is for all of it."""
    program = (
        "import gc; from gorgo.cli.launch import freeze_startup_objects; gc.disable(); freeze_startup_objects(); "
        "print(gc.get_freeze_count() > 0, gc.isenabled(), gc.get_threshold())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"True True {(YOUNG_OBJECTS, MIDDLE_RUNS, FULL_RUNS)}"


async def expect_nothing_large(fleet: Running, cycles: list[object]) -> None:
    await fleet.idle()
    gc.collect()
    found = {type(item).__name__ for item in cycles for held in gc.get_referents(item) if is_large(held)}
    assert found == set()


def is_large(thing: object) -> bool:
    return isinstance(thing, bytes | bytearray | str) and len(thing) >= LARGE
