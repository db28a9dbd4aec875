"""One call on a kept connection: what goes over the wire, and when the connection may carry the next one."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import cast

import httpx
import pytest

from gorgo.core.latency.ttft import INITIAL_WINDOW_BYTES, PACING_GAIN, Pacing, TcpWindows, paced_round_trips
from gorgo.live.event_loop import BUSY_WRITES, writes_of
from gorgo.live.upstream import connection as connection_module
from gorgo.live.upstream.client import UpstreamError, encode_head
from gorgo.live.upstream.connection import (
    SLICE_BYTES,
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
from gorgo.live.upstream.response import MAX_INTERIM, HttpResponse
from tests.live.test_event_loop import RecordedTransport
from tests.live.upstream.engine import OK, engine, whole
from tests.proxy.conftest import QUIET, Start, until
from tests.proxy.fakes import DONE, delta, stream

ON_BOTH_LOOPS = True

START = b"POST /v1 HTTP/1.1\r\n"


def test_a_head_has_headers_in_their_order_with_duplicates_and_bytes_as_they_are() -> None:
    headers = [(b"accept", b"a"), (b"x-y", b"\xe9"), (b"accept", b"b")]
    assert encode_head(START, headers) == START + b"accept: a\r\nx-y: \xe9\r\naccept: b\r\n\r\n"
    assert encode_head(START, []) == START + b"\r\n"


@pytest.mark.parametrize("odd", [b"a\r\nx: y", b"a\nx: y", b"a\rb", b"a\0b", b"a\x7fb", b"\x0b"])
def test_a_head_never_holds_a_line_that_is_not_its_own(odd: bytes) -> None:
    with pytest.raises(ValueError, match="control character"):
        encode_head(START, [(b"x-y", odd)])
    with pytest.raises(ValueError, match="control character"):
        encode_head(START, [(odd, b"v")])


@pytest.mark.parametrize("size", [0, 1000, 100_000, 2 * WRITE_BYTES + 1])
async def test_body_arrives_whole_and_the_connection_carries_the_next_call(size: int) -> None:
    got: list[tuple[bytes, bytes]] = []

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            got.append((head, await reader.readexactly(size)))
            writer.write(OK)

    body = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    async with engine(speak) as (upstream, found):
        for _ in range(2):
            assert await whole(await upstream.open("/v1", [(b"a", b"b")], body)) == b"ok"
        assert found.connections == 1
        assert upstream.open_responses == 0
    assert [body for _, body in got] == [body, body]
    assert got[0][0].startswith(b"POST /base/v1 HTTP/1.1\r\nHost: 127.0.0.1:")
    assert got[0][0].endswith(b"\r\na: b\r\nContent-Length: %d\r\n\r\n" % size)


async def test_what_comes_before_the_answer_is_passed_over() -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + OK)
        await reader.read()

    async with engine(speak) as (upstream, _):
        source = await upstream.open("/v1", [], b"")
        assert (source.status, await whole(source)) == (200, b"ok")


async def test_a_flood_of_interim_answers_is_a_failure_at_its_ninth() -> None:
    sent = asyncio.Event()

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\n" * (MAX_INTERIM + 1) + OK)
        sent.set()
        await reader.read()

    async with engine(speak) as (upstream, found):
        with pytest.raises(UpstreamError, match="protocol_error"):
            await upstream.open("/v1", [], b"")
        assert sent.is_set()
        await until(lambda: found.open == 0)


@pytest.mark.parametrize("ends", [True, False])
async def test_chunks_of_one_byte_arrive_whole_and_others_run_between_them(ends: bool) -> None:
    """With `ends` the connection ends with the answer, which has no last chunk then."""
    size = 60_000

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(head + b"1\r\nx\r\n" * size + (b"" if ends else b"0\r\n\r\n"))
        await writer.drain()
        if not ends:
            await reader.read()

    async def count() -> None:
        while True:
            counted.append(None)
            await asyncio.sleep(0)

    counted: list[None] = []
    async with engine(speak) as (upstream, found):
        source = await upstream.open("/v1", [], b"")
        counting = asyncio.create_task(count())
        got = bytearray()
        with pytest.raises(UpstreamError, match="disconnected") if ends else nullcontext():
            async with source.chunks() as chunks:
                async for chunk in chunks:
                    got += chunk
        counting.cancel()
        await source.aclose()
        assert got == b"x" * size
        assert len(counted) >= 6 * size // SLICE_BYTES
        assert found.connections == 1


async def test_an_answer_that_came_before_the_body_was_sent_ends_its_connection() -> None:
    """The rest of that body would be taken for the next request."""

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno")
        # Larger than what the sockets take: the client is still writing when it is read at last.
        await asked_again.wait()
        await reader.read()

    asked_again = asyncio.Event()
    async with engine(speak) as (upstream, found):
        source = await upstream.open("/v1", [], b"x" * 32 * 1024 * 1024)
        assert (source.status, await whole(source)) == (413, b"no")
        asked_again.set()
        await until(lambda: found.open == 0)
        assert await whole(await upstream.open("/v1", [], b"")) == b"no"
        assert found.connections == 2


async def test_an_answer_that_is_not_read_to_its_end_ends_its_connection() -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n12345")
        await reader.read()

    async with engine(speak) as (upstream, found):
        source = await upstream.open("/v1", [], b"")
        async with source.chunks() as chunks:
            assert await anext(aiter(chunks)) == b"12345"
        await source.aclose()
        await source.aclose()
        await until(lambda: found.open == 0)
        assert (upstream.connections, upstream.open_responses) == (0, 0)


async def test_an_answer_that_breaks_off_is_said_to() -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n12345")
        await writer.drain()

    async with engine(speak) as (upstream, _):
        source = await upstream.open("/v1", [], b"")
        with pytest.raises(UpstreamError, match="disconnected"):
            await whole(source)
        await source.aclose()


@pytest.mark.parametrize("nonsense", [b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\nbad header\r\n\r\n"])
async def test_an_answer_that_is_not_http_is_a_failure_of_the_protocol(nonsense: bytes) -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(nonsense)
        await reader.read()

    async with engine(speak) as (upstream, found):
        with pytest.raises(UpstreamError, match="protocol_error"):
            await upstream.open("/v1", [], b"")
        await until(lambda: found.open == 0)
        assert upstream.open_responses == 0


class Given(asyncio.Transport):
    """What the socket is given, a list per write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[list[bytes]] = []
        self.closing = False

    def is_closing(self) -> bool:
        return self.closing

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes.append([bytes(data)])

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.writes.append([bytes(data) for data in list_of_data])


def connected(transport: asyncio.Transport) -> ReplicaConnection:
    link = ReplicaConnection(lambda _: None, lambda _: None)
    link.connection_made(transport)
    return link


@pytest.mark.parametrize("size", [0, 1000, 100_000, 2 * WRITE_BYTES + 1])
async def test_the_head_never_travels_without_the_first_of_the_body(size: int) -> None:
    given, body = Given(), bytes(size)
    link = connected(given)
    link.write_request(b"head", body, HttpResponse(link))
    assert b"".join(given.writes[0]) == b"head" + body[:WRITE_BYTES]
    assert len(given.writes) == 1
    if link._writer is not None:
        await link._writer
    assert b"".join(part for parts in given.writes for part in parts) == b"head" + body


@pytest.mark.parametrize("lost", ["closing", "gone"])
async def test_rest_of_a_large_body_is_not_written_to_a_connection_that_is_lost(lost: str) -> None:
    given = Given()
    link = connected(given)
    link.write_request(b"head", bytes(3 * WRITE_BYTES), HttpResponse(link))
    assert link._writer is not None
    if lost == "closing":
        given.closing = True
    else:
        link.connection_lost(None)
    await asyncio.wait([link._writer])
    assert len(given.writes) == 1
    with pytest.raises(httpx.WriteError, match="the connection is closed"):
        link.write_request(b"head", b"", HttpResponse(link))


async def test_connection_of_a_repeated_request_is_closed_with_all_others() -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if found.connections > 1:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n12345")
            await reader.read()
            return
        writer.write(OK)
        await reader.readuntil(b"\r\n\r\n")  # and hangs up without an answer

    async with engine(speak) as (upstream, found):
        assert await whole(await upstream.open("/v1", [], b"")) == b"ok"
        again = await upstream.open("/v1", [], b"")
        assert (again.status, found.connections, found.open) == (200, 2, 1)
        await upstream.aclose()
        await until(lambda: found.open == 0)
        await again.aclose()


def test_buffers_of_a_call_are_bounded() -> None:
    assert (connection_module.READ_BUFFER_BYTES, SLICE_BYTES) == (65_536, 32_768)
    assert (WRITE_BYTES, connection_module._JOINED_BYTES) == (524_288, 65_536)


# --- States of a kept connection: when a request is written, what ends it, and what TCP tells of it.


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
EMPTY_OK = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


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
    rig.connection.data_received(EMPTY_OK)
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
