"""States of a kept connection: when a request is written, what ends it, and what TCP tells of it."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from gorgo.core.latency.ttft import INITIAL_WINDOW_BYTES, PACING_GAIN, Pacing, TcpWindows, paced_round_trips
from gorgo.live.event_loop import BUSY_WRITES, writes_of
from gorgo.live.upstream.connection import (
    WRITE_BYTES,
    ConnectionTracker,
    NextConnectionState,
    PooledConnection,
    ReadTcpInfo,
    ReplicaConnection,
    bbr_state,
    idling_shrinks,
    read_tcp_info,
)
from gorgo.live.upstream.response import HttpResponse
from tests.live.test_event_loop import RecordedTransport
from tests.proxy.conftest import QUIET, Start, until
from tests.proxy.fakes import DONE, delta, stream

ONE_HUNDRED_KB = {"messages": [{"role": "user", "content": "w" * 100_000}], "stream": True}


class FakeLink:
    def __init__(self) -> None:
        self.open = True

    def is_connected(self) -> bool:
        return self.open


class Pool:
    """Kept connections under a clock of their own."""

    def __init__(self, *, shrinks: bool = True, read_tcp_info: ReadTcpInfo = lambda _: None) -> None:
        self.now = 100.0
        self.kept = ConnectionTracker(
            keep_alive_s=4.0, idling_shrinks=shrinks, read_tcp_info=read_tcp_info, clock=lambda: self.now
        )

    def serve(self, link: FakeLink, body_bytes: int) -> bool:
        reused = self.kept.on_acquire(link, body_bytes)
        self.kept.on_release(link)
        return reused


def test_a_pool_without_an_idle_connection_opens_one() -> None:
    pool, link = Pool(), FakeLink()
    assert pool.kept.next() is None
    pool.kept.on_acquire(link, 500)
    assert pool.kept.next() is None


def test_the_last_given_back_is_the_next_one_taken() -> None:
    pool, small, large = Pool(), FakeLink(), FakeLink()
    pool.serve(small, 500)
    pool.serve(large, 100_000)
    assert pool.kept.next() == NextConnectionState(TcpWindows(114_600.0, 65_535.0), 0.0)
    pool.kept.on_acquire(large, 500)
    assert pool.kept.next() == NextConnectionState(TcpWindows(), 0.0)


def test_a_connection_tells_whether_it_had_served_before() -> None:
    pool, link = Pool(), FakeLink()
    assert [pool.serve(link, 500), pool.serve(link, 500)] == [False, True]


def test_a_lost_connection_is_forgotten() -> None:
    pool, link = Pool(), FakeLink()
    pool.serve(link, 500)
    assert (pool.kept.next() is None, pool.kept.alive) == (False, 1)
    pool.kept.on_lost(link)
    assert (pool.kept.next(), pool.kept.alive) == (None, 0)


def test_closed_and_expired_connections_are_passed_over() -> None:
    pool, closed, expired, kept = Pool(), FakeLink(), FakeLink(), FakeLink()
    pool.serve(expired, 500)
    pool.now += 4.5
    pool.serve(kept, 100_000)
    pool.serve(closed, 500)
    closed.open = False
    found = pool.kept.next()
    assert found is not None
    assert found[0].cwnd == 114_600.0
    pool.now += 4.5
    assert pool.kept.next() is None
    assert pool.kept.alive == 2


def test_a_ping_on_an_idle_connection_keeps_it_open_but_not_its_window() -> None:
    pool, link = Pool(), FakeLink()
    pool.serve(link, 100_000)
    pool.now += 2.0
    pool.serve(link, 200)
    assert pool.kept.next() == NextConnectionState(TcpWindows(INITIAL_WINDOW_BYTES, 65_535.0), 0.0)


def test_where_idling_costs_nothing_a_window_stays() -> None:
    pool, link = Pool(shrinks=False), FakeLink()
    pool.serve(link, 100_000)
    pool.now += 2.0
    pool.serve(link, 200)
    found = pool.kept.next()
    assert found == NextConnectionState(TcpWindows(114_600.0, 65_535.0), float("-inf"))


def test_the_kernel_is_asked_for_pace_after_each_request_unless_it_does_not_pace() -> None:
    told: dict[FakeLink, tuple[TcpWindows, Pacing]] = {}
    asked: list[FakeLink] = []

    def read_tcp_info(link: PooledConnection) -> tuple[TcpWindows, Pacing] | None:
        assert isinstance(link, FakeLink)
        asked.append(link)
        return told.get(link)

    pool, paced, plain = Pool(read_tcp_info=read_tcp_info), FakeLink(), FakeLink()
    for number in range(2):
        told[paced] = TcpWindows(20_000.0 + number, 70_000.0), Pacing(50_000.0, 1_448.0)
        pool.serve(plain, 500)
        pool.serve(paced, 100_000)
    assert asked == [plain, paced, paced]
    assert pool.kept.next() == NextConnectionState(*told[paced][:1], float("-inf"), told[paced][1])


@pytest.mark.parametrize(("restart", "shrinks"), [("1", True), ("0", False)])
def test_the_kernel_s_setting_is_read(tmp_path: Path, restart: str, shrinks: bool) -> None:
    (tmp_path / "tcp_slow_start_after_idle").write_text(restart + "\n")
    assert idling_shrinks(tmp_path) is shrinks


def test_a_kernel_without_such_settings_counts_as_one_that_shrinks(tmp_path: Path) -> None:
    assert idling_shrinks(tmp_path / "none")


async def test_the_router_hears_when_a_replica_hangs_up(start: Start) -> None:
    proxy = await start.fleet([stream(delta("a"), DONE)])
    columns = proxy.state.routing.router._fleet.columns
    await proxy.client.post("/v1/chat/completions", json=ONE_HUNDRED_KB)
    gateway = proxy.state.routing.gateway
    await until(lambda: bool(gateway.stale_connections))
    gateway.refresh_connections()
    assert columns.cwnd_bytes[0] > 0.0
    for link in list(proxy.state.replicas.targets["r0"].upstream._pool.tracker._last_use):
        cast(ReplicaConnection, link).close()
    await until(lambda: bool(gateway.stale_connections))
    gateway.refresh_connections()
    assert columns.cwnd_bytes[0] == 0.0


async def test_the_router_prices_the_connection_that_the_next_request_gets(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gorgo.live.upstream.client.idling_shrinks", lambda: False)
    monkeypatch.setattr("gorgo.live.upstream.client.bbr_state", lambda _, **__: None)
    proxy = await start.fleet([stream(delta("a"), DONE)], proxy=replace(QUIET, policy="gorgo-ms"))
    (before,) = proxy.state.routing.router.view.snapshots(now=proxy.state.routing.clock())
    assert before.rtt_ms is not None
    trips = []
    for _ in range(3):
        answer = await proxy.client.post("/v1/chat/completions", json=ONE_HUNDRED_KB)
        (decision,) = proxy.state.routing.router.view.decisions(answer.headers["x-request-id"])
        trips.append(round(float(decision.terms["rtt"][0]) / before.rtt_ms, 6))
        await proxy.idle()
    assert trips == [3, 2, 1]


async def test_the_kernel_s_pace_is_priced_and_a_new_connection_paces_too(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = TcpWindows(200_000.0, 200_000.0), Pacing(100_000.0, 1_000.0)
    monkeypatch.setattr("gorgo.live.upstream.client.bbr_state", lambda _, **__: told)
    proxy = await start.fleet([stream(delta("a"), DONE)], proxy=replace(QUIET, policy="gorgo-ms"))
    (view,) = proxy.state.routing.router.view.snapshots(now=proxy.state.routing.clock())
    assert view.rtt_ms is not None
    trips = []
    for _ in range(2):
        answer = await proxy.client.post("/v1/chat/completions", json=ONE_HUNDRED_KB)
        (decision,) = proxy.state.routing.router.view.decisions(answer.headers["x-request-id"])
        trips.append(float(decision.terms["rtt"][0]) / view.rtt_ms)
        await proxy.idle()
        for link in list(proxy.state.replicas.targets["r0"].upstream._pool.tracker._last_use):
            cast(ReplicaConnection, link).close()
        await until(lambda: bool(proxy.state.routing.gateway.stale_connections))
        proxy.state.routing.gateway.refresh_connections()
        assert proxy.state.routing.router._fleet.columns.cwnd_bytes[0] == 0.0
    # After a ping, of which the kernel told as much as after a body; then on a new connection.
    assert trips == pytest.approx([2.0, 1.0 + paced_round_trips(100_000, TcpWindows(), Pacing())], abs=0.03)


# --- In a busy loop a request waits for the next turn: it is written once, or not at all if its connection ends
# before.


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


@pytest.fixture
def connection() -> Iterator[socket.socket]:
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as server,
        closing(socket.create_connection(server.getsockname())) as client,
    ):
        yield client


def info(*, segments_sent: int, size: int = 232) -> bytes:
    fields = {
        16: (4, 1_448),
        68: (4, 90_000),
        80: (4, 20),
        104: (8, 500_000),
        156: (4, segments_sent),
        228: (4, 99_000),
    }
    made = bytearray(size)
    for offset, (width, value) in fields.items():
        made[offset : offset + width] = value.to_bytes(width, sys.byteorder)
    return bytes(made[:size])


@pytest.mark.skipif(sys.platform != "linux", reason="what Linux tells")
def test_windows_are_bytes_and_the_pace_is_for_a_round_trip() -> None:
    told = TcpWindows(28_960.0, 99_000.0), Pacing(45_000.0, 1_448.0)
    assert read_tcp_info(info(segments_sent=30)) == told


@pytest.mark.skipif(sys.platform != "linux", reason="what Linux tells")
def test_the_first_ten_segments_of_a_connection_are_a_burst() -> None:
    found = read_tcp_info(info(segments_sent=4))
    assert found is not None
    assert found[1].burst == 6 * 1_448.0


@pytest.mark.skipif(sys.platform != "linux", reason="what Linux tells")
def test_a_kernel_that_does_not_tell_the_receiver_s_window_tells_nothing() -> None:
    assert read_tcp_info(info(segments_sent=4)[:224]) is None


@pytest.mark.skipif(sys.platform != "linux", reason="what Linux tells")
def test_zeros_do_not_stop_a_count_of_flights() -> None:
    assert read_tcp_info(bytes(16) + (1_448).to_bytes(4, sys.byteorder) + bytes(212)) == (
        TcpWindows(1_448.0, 1_448.0),
        Pacing(1_448.0, 14_480.0),
    )


@pytest.mark.skipif(sys.platform != "linux", reason="what Linux tells")
def test_a_sender_that_does_not_pace_and_a_closed_socket_tell_nothing(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
    assert bbr_state(connection) is None
    connection.close()
    assert bbr_state(connection) is None


@pytest.mark.skipif(sys.platform != "linux", reason="what Linux tells")
def test_a_real_new_sender_paces_as_the_model_says(connection: socket.socket) -> None:
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
    except OSError:
        pytest.skip("this kernel has no BBR")
    found = bbr_state(connection)
    assert found is not None
    assert bbr_state(connection, paces=True) == found
    windows, pacing = found
    assert pacing.bytes_per_round_trip == pytest.approx(PACING_GAIN * windows.cwnd, rel=0.05)
    assert pacing.burst == pytest.approx(windows.cwnd)
