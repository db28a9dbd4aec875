"""Clients that take their time or all the room: bounded in bytes, lines, seconds and connections."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress

import pytest
from aiohttp import web

from gorgo.live.listener.heads import PartialHeads
from tests.proxy.conftest import Start, until
from tests.proxy.fakes import DONE, REPLICA, answer, chat, delta, hang, stream
from tests.proxy.raw import RawClient, connected

#: Also on the HTTP of `gorgo serve --plain`.
IN_BOTH_FORMS = True
#: Where stock hypercorn and h11 differ: why, and the tests of it.
OWN_ALONE = {
    "hypercorn has no time limit of a head": (
        "test_head_that_is_never_complete_is_a_408",
        "test_head_that_drips_is_a_408_however_steadily",
        "test_second_head_on_a_connection_has_its_own_time",
        "test_connection_without_a_request_ends_when_a_head_is_due",
    ),
    "hypercorn's refusals have no body": ("test_head_of_too_many_bytes_is_a_431",),
    "h11 does not count lines": ("test_head_of_too_many_lines_is_a_431",),
    "hypercorn does not count connections": (
        "test_one_connection_too_many_is_closed_and_those_with_a_request_stay",
        "test_connection_that_is_idle_for_longest_makes_room_for_a_new_one",
    ),
    "hypercorn asks for each body at once": (
        "test_client_that_waits_to_be_asked_for_a_body_is_refused_before_it_is_asked",
    ),
    "hypercorn does not count incomplete heads in sum": (
        "test_heads_that_do_not_end_are_bounded_in_sum_and_whole_ones_pass",
        "test_connections_that_end_in_the_middle_of_a_head_count_no_longer",
        "test_bytes_behind_requests_in_progress_are_bounded_in_sum_and_each_request_is_answered",
    ),
}

CHAT = "/v1/chat/completions"
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\n"


async def refusal(client: RawClient) -> tuple[int, str]:
    """Status and code of the answer after which the connection ends."""
    head, _, body = (await client.rest()).partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["code"]


async def test_head_that_is_never_complete_is_a_408(start: Start) -> None:
    fleet = await start.fleet([answer(200)], header_timeout_s=0.1)
    for begun in (b"P", HEAD, HEAD + b"x-a: 1\r\n"):
        async with connected(fleet.addresses.data) as client:
            client.writer.write(begun)
            assert await refusal(client) == (408, "request_timeout")
    await fleet.idle()


async def test_head_that_drips_is_a_408_however_steadily(start: Start) -> None:
    fleet = await start.fleet([answer(200)], header_timeout_s=0.2)
    async with connected(fleet.addresses.data) as client:

        async def drip() -> None:
            client.writer.write(HEAD)
            while not client.reader.at_eof():
                client.writer.write(b"x-a: 1\r\n")
                await asyncio.sleep(0.02)

        dripping = asyncio.create_task(drip())
        assert await refusal(client) == (408, "request_timeout")
        dripping.cancel()
    assert fleet.replicas[0].seen == []
    await fleet.idle()


async def test_second_head_on_a_connection_has_its_own_time(start: Start) -> None:
    fleet = await start.fleet([answer(200)], header_timeout_s=0.1)
    async with connected(fleet.addresses.data) as client:
        for _ in range(2):
            await client.post(CHAT, chat())
            assert b" 200 " in await client.head()
            await client.reader.readexactly(2)
        client.writer.write(HEAD)
        assert await refusal(client) == (408, "request_timeout")
    await fleet.idle()


async def test_head_time_does_not_run_while_a_stream_does(start: Start) -> None:
    fleet = await start.fleet([hang(delta("good"), rest=[DONE])], header_timeout_s=0.05)
    async with connected(fleet.addresses.data) as client:
        client.writer.write(HEAD[:9])
        await asyncio.sleep(0)
        body = chat(stream=True)
        client.writer.write(HEAD[9:] + b"content-length: %d\r\n\r\n%b" % (len(body), body))
        assert b"good" in await client.reader.readuntil(b"good")
        await asyncio.sleep(0.1)  # twice the limit
        fleet.replicas[0].release.set()
        assert b"[DONE]" in await client.reader.readuntil(b"0\r\n\r\n")
    await fleet.idle()


async def test_connection_that_is_idle_between_requests_is_not_late(start: Start) -> None:
    fleet = await start.fleet([answer(200)], header_timeout_s=0.05)
    async with connected(fleet.addresses.data) as client:
        for _ in range(2):
            await client.post(CHAT, chat())
            assert b" 200 " in await client.head()
            await client.reader.readexactly(2)
            await asyncio.sleep(0.1)  # twice the limit


async def test_body_that_stops_is_a_408(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gorgo.live.http.body.IDLE_TIMEOUT_S", 0.1)
    fleet = await start.fleet([answer(200)])
    async with connected(fleet.addresses.data) as client:
        await client.post(CHAT, b'{"model"', length=100)
        assert await refusal(client) == (408, "request_timeout")
    await fleet.idle()


async def test_body_that_drips_is_a_408_when_its_whole_time_is_over(start: Start) -> None:
    fleet = await start.fleet([answer(200)], body_timeout_s=0.3)
    async with connected(fleet.addresses.data) as client:

        async def drip() -> None:
            await client.post(CHAT, b"{", length=1_000_000)
            while not client.reader.at_eof():
                client.writer.write(b" ")
                await asyncio.sleep(0.02)

        dripping = asyncio.create_task(drip())
        assert await refusal(client) == (408, "request_timeout")
        dripping.cancel()
    await fleet.idle()


async def test_head_of_too_many_bytes_is_a_431(start: Start) -> None:
    fleet = await start.fleet([answer(200)], max_header_bytes=4096)
    large = HEAD + b"x-a: " + b"a" * 5000
    for request in (large, large + b"\r\ncontent-length: 2\r\n\r\n{}"):
        async with connected(fleet.addresses.data) as client:
            client.writer.write(request)
            assert await refusal(client) == (431, "headers_too_large")
    assert fleet.replicas[0].seen == []


async def test_head_of_too_many_lines_is_a_431(start: Start) -> None:
    fleet = await start.fleet([answer(200)])
    async with connected(fleet.addresses.data) as client:
        await client.post(CHAT, chat(), *["x-a: 1"] * 110)
        assert b" 200 " in await client.head()
    async with connected(fleet.addresses.data) as client:
        await client.post(CHAT, chat(), *["x-a: 1"] * 127)
        assert await refusal(client) == (431, "headers_too_large")
    assert len(fleet.replicas[0].seen) == 1


async def test_endless_head_is_cut_while_it_comes(start: Start) -> None:
    fleet = await start.fleet([answer(200)])
    async with connected(fleet.addresses.data) as client:
        written = 0
        client.writer.write(HEAD + b"x-a: ")
        try:
            while not client.writer.is_closing() and written < 1 << 26:
                client.writer.write(b"a" * 65_536)
                await client.writer.drain()
                written += 65_536
        except ConnectionError:
            pass
    # What the buffers of two sockets take on top of the limit.
    assert written < 1 << 25
    await fleet.idle()


async def test_one_connection_too_many_is_closed_and_those_with_a_request_stay(start: Start) -> None:
    fleet = await start.fleet([hang(delta("good"), rest=(DONE,))], max_connections=4)
    async with AsyncExitStack() as stack:
        held = []
        for _ in range(4):
            held.append(await stack.enter_async_context(connected(fleet.addresses.data)))
            await held[-1].post(CHAT, chat(stream=True))
            assert b"good" in await held[-1].reader.readuntil(b"good")
        async with connected(fleet.addresses.data) as late:
            assert await late.rest() == b""
        fleet.replicas[0].release.set()
        for client in held:
            await client.reader.readuntil(b"0\r\n\r\n")
    async with asyncio.timeout(10):
        while not await served(fleet.addresses.data):  # until the server has seen that they left
            await asyncio.sleep(0)


@pytest.mark.parametrize("used", [False, True])
async def test_connection_that_is_idle_for_longest_makes_room_for_a_new_one(start: Start, used: bool) -> None:
    fleet = await start.fleet([stream(delta("good"), DONE)], max_connections=4)
    async with AsyncExitStack() as stack:
        idle = []
        for _ in range(4):
            idle.append(await stack.enter_async_context(connected(fleet.addresses.data)))
            if used:
                await idle[-1].post(CHAT, chat(stream=True))
                assert b"good" in await idle[-1].reader.readuntil(b"0\r\n\r\n")
        if used:  # the first is used again, so the second is idle for longest
            await idle[0].post(CHAT, chat(stream=True))
            await idle[0].reader.readuntil(b"0\r\n\r\n")
            idle = [*idle[1:], idle[0]]
        late = await stack.enter_async_context(connected(fleet.addresses.data))
        await late.post(CHAT, chat(stream=True))
        assert b"good" in await late.reader.readuntil(b"0\r\n\r\n")
        with suppress(ConnectionError):
            assert await idle[0].rest() == b""
        for client in idle[1:]:
            await client.post(CHAT, chat(stream=True))
            assert b"good" in await client.reader.readuntil(b"0\r\n\r\n")


async def test_connection_without_a_request_ends_when_a_head_is_due(start: Start) -> None:
    fleet = await start.fleet([stream(delta("good"), DONE)], header_timeout_s=0.05)
    async with asyncio.timeout(10), connected(fleet.addresses.data) as silent:
        assert await silent.rest() == b""


async def test_client_that_does_not_read_does_not_keep_its_connection(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gorgo.live.listener.connection.cycle.LINGER_S", 0.05)
    flood = tuple(delta("x" * 60_000) for _ in range(400))
    fleet = await start.fleet([hang(*flood)], stream_idle_timeout_s=0.3, max_connections=1)
    async with connected(fleet.addresses.data) as client:
        client.reader._transport.pause_reading()  # type: ignore[attr-defined]
        await client.post(CHAT, chat(stream=True))
        async with asyncio.timeout(10):
            while not await served(fleet.addresses.data):
                await asyncio.sleep(0.01)
        client.reset()
    await fleet.idle()


async def test_body_that_is_announced_too_large_is_a_413_though_it_never_comes(start: Start) -> None:
    fleet = await start.fleet([answer(200)])
    for more in (b"", b"expect: 100-continue\r\n"):
        async with connected(fleet.addresses.data) as client:
            client.writer.write(HEAD + more + b"content-length: 1000000000\r\nconnection: close\r\n\r\n")
            said = await client.rest()
        assert b"HTTP/1.1 413 " in said
    await fleet.idle()


async def test_client_that_waits_to_be_asked_for_a_body_is_refused_before_it_is_asked(start: Start) -> None:
    fleet = await start.fleet([answer(200)])
    for size, before in (
        (1_000_000_000, b"HTTP/1.1 413 "),
        (len(chat()), b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 "),
    ):
        async with connected(fleet.addresses.data) as client:
            client.writer.write(HEAD + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % size)
            said = await client.reader.readexactly(13)
            assert before.startswith(said)
            if size == len(chat()):
                client.writer.write(chat())
                said += await client.reader.readexactly(len(before) - 13)
                assert said == before
    await fleet.idle()


async def test_compressed_body_is_sent_on_unpacked_without_its_coding(start: Start) -> None:
    fleet = await start.fleet([answer(200)])
    small, large = chat(), chat(text="\u03c0 is a long story. " * 20_000)
    for body in (small, large):
        for coding, packed in (
            ("gzip", gzip.compress(body)),
            ("identity, deflate", zlib.compress(body)),
            ("identity", body),
        ):
            response = await fleet.client.post(CHAT, content=packed, headers={"content-encoding": coding})
            assert response.status_code == 200, (coding, response.text)
            seen = fleet.replicas[0].seen[-1]
            assert seen.body == body
            assert seen.header("content-length") == [str(len(body))]
            assert seen.header("content-encoding") == []
    chunked = await fleet.client.post(
        CHAT, content=pieces_of(gzip.compress(large)), headers={"content-encoding": "gzip"}
    )
    assert chunked.status_code == 200
    assert fleet.replicas[0].seen[-1].body == large
    assert len(fleet.replicas[0].seen) == 7


async def pieces_of(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), 100):
        yield body[start : start + 100]


async def test_compressed_body_that_cannot_be_read_or_grows_too_much_is_refused(start: Start) -> None:
    fleet = await start.fleet([answer(200)], max_body_bytes=1 << 20)
    large = gzip.compress(chat(text="x" * (1 << 20)))
    for coding, body, status, code in (
        ("compress", chat(), 415, "unsupported_media_type"),
        ("gzip, gzip", gzip.compress(gzip.compress(chat())), 415, "unsupported_media_type"),
        ("gzip", chat(), 400, "invalid_request"),
        ("gzip", gzip.compress(chat())[:-1], 400, "invalid_request"),
        ("gzip", gzip.compress(b"{"), 400, "invalid_json"),
        ("gzip", large, 413, "request_too_large"),
        ("deflate", zlib.compress(bytes(64 << 20)), 413, "request_too_large"),
    ):
        response = await fleet.client.post(CHAT, content=body, headers={"content-encoding": coding})
        assert (response.status_code, response.json()["error"]["code"]) == (status, code), coding
    refused = await fleet.client.post(CHAT, content=chat(), headers={"content-encoding": "compress"})
    assert refused.headers["accept-encoding"].startswith("gzip, deflate")
    assert "one of: gzip, deflate" in refused.json()["error"]["message"]
    assert fleet.replicas[0].seen == []
    await fleet.idle()


async def test_body_of_countless_pieces_is_a_400_at_once(start: Start) -> None:
    fleet = await start.fleet([answer(200)])
    brackets = chat(text="x")[:-1] + b', "x": [' + b"[]," * (1 << 20) + b"[]]}"
    parts = chat(messages=[{"role": "user", "content": [{}] * 100_000}])
    for body, code in ((brackets, "invalid_json"), (parts, "invalid_request")):
        response = await fleet.client.post(CHAT, content=body)
        assert (response.status_code, response.json()["error"]["code"]) == (400, code)
        assert "expected at most" in response.json()["error"]["message"]
    assert (await fleet.client.post(CHAT, content=chat(text="[" * 1_000_000))).status_code == 200
    assert len(fleet.replicas[0].seen) == 1


async def test_bodies_that_the_admin_listener_does_not_read_leave_nothing_behind(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gorgo.live.process.ADMIN_CONNECTIONS", 4)
    fleet = await start.fleet([answer(200)])
    pieces = b"transfer-encoding: chunked\r\n\r\n" + (b"20\r\n%b\r\n" % (b"x" * 32)) * 300
    for path in (b"/admin/flush", b"/admin/page/login", b"/nowhere"):
        for _ in range(6):
            async with connected(fleet.addresses.admin) as client:
                client.writer.write(b"POST %b HTTP/1.1\r\nhost: g\r\n%b" % (path, pieces))
                said = await client.rest()
                assert said[9:12] in (b"401", b"413", b"404"), path
    assert (await fleet.admin.get("/admin/fleet")).status_code == 200


async def test_body_that_drips_on_the_admin_listener_is_a_408_without_any_token(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gorgo.live.admin.calls.BODY_S", 0.1)
    fleet = await start.fleet([answer(200)])
    async with connected(fleet.addresses.admin) as client:
        client.writer.write(b"POST /admin/page/login HTTP/1.1\r\nhost: g\r\ncontent-length: 100\r\n\r\ntoken=")
        assert await refusal(client) == (408, "request_timeout")


async def test_operator_who_leaves_in_the_middle_of_a_body_is_no_fault_of_ours(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = await start.fleet([answer(200)])
    async with connected(fleet.addresses.admin) as client:
        client.writer.write(b"POST /admin/page/login HTTP/1.1\r\nhost: g\r\ncontent-length: 100\r\n\r\ntoken=")
        client.writer.write_eof()
        await client.rest()
    await fleet.stop()
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def served(address: tuple[str, int]) -> bool:
    async with connected(address) as client:
        client.writer.write(b"GET /health HTTP/1.1\r\nhost: g\r\nconnection: close\r\n\r\n")
        return b" 200 " in await client.rest()


# --- Heads that are not complete, on many connections: bounded in sum, and a head in one piece is served beside them.


BEGIN = b"GET /health HTTP/1.1\r\nhost: g\r\nx-long: "


class CountingHeads(PartialHeads):
    """Also counts all bytes that ever waited."""

    def __init__(self) -> None:
        super().__init__()
        self.came_bytes = 0

    def replace(self, before: int, now: int) -> bool:
        self.came_bytes += max(0, now - before)
        return super().replace(before, now)


@pytest.fixture
def heads(monkeypatch: pytest.MonkeyPatch) -> list[CountingHeads]:
    """The sums of the listeners, each with room for two of the test's heads."""
    made: list[CountingHeads] = []

    def make() -> PartialHeads:
        made.append(CountingHeads())
        return made[-1]

    monkeypatch.setattr("gorgo.live.listener.heads.MAX_BYTES", 100_000)
    monkeypatch.setattr("gorgo.live.listener.listener.PartialHeads", make)
    return made


async def begun(client: RawClient) -> None:
    """Send 40 kB of a head."""
    client.writer.write(BEGIN + b"a" * 40_000)
    await client.writer.drain()


async def test_heads_that_do_not_end_are_bounded_in_sum_and_whole_ones_pass(
    start: Start, heads: list[CountingHeads]
) -> None:
    fleet = await start.fleet([answer(200)])
    async with AsyncExitStack() as stack:
        first, second, third = [await stack.enter_async_context(connected(fleet.addresses.data)) for _ in range(3)]
        await begun(first)
        await begun(second)
        await until(lambda: sum(one.used_bytes for one in heads) > 80_000)
        await begun(third)
        refused = await third.rest()
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"buffers_full" in refused
        assert (await fleet.client.post("/v1/chat/completions", content=chat())).status_code == 200
        first.writer.write(b"\r\n\r\n")
        assert (await first.head()).startswith(b"HTTP/1.1 200 ")
        fourth = await stack.enter_async_context(connected(fleet.addresses.data))
        await begun(fourth)
        fourth.writer.write(b"\r\n\r\n")
        assert (await fourth.head()).startswith(b"HTTP/1.1 200 ")


async def test_connections_that_end_in_the_middle_of_a_head_count_no_longer(
    start: Start, heads: list[CountingHeads]
) -> None:
    fleet = await start.fleet([answer(200)])
    for number in range(10):
        async with connected(fleet.addresses.data) as client:
            await begun(client)
            if number % 2:
                client.reset()
    await until(lambda: not sum(one.used_bytes for one in heads))
    async with connected(fleet.addresses.data) as client:
        await begun(client)
        client.writer.write(b"\r\n\r\n")
        assert (await client.head()).startswith(b"HTTP/1.1 200 ")


async def test_bytes_behind_requests_in_progress_are_bounded_in_sum_and_each_request_is_answered(
    start: Start, heads: list[CountingHeads]
) -> None:
    async def late(request: web.Request, body: bytes) -> web.StreamResponse:
        await request.app[REPLICA].release.wait()
        return await answer(200)(request, body)

    fleet = await start.fleet([late])
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connected(fleet.addresses.data)) for _ in range(5)]
        for client in clients:
            await client.post("/v1/chat/completions", chat())
        await until(lambda: len(fleet.replicas[0].seen) == len(clients))
        for number, client in enumerate(clients, 1):
            await begun(client)
            await until(lambda least=40_000 * number: sum(one.came_bytes for one in heads) >= least)  # type: ignore[misc]
            assert sum(one.used_bytes for one in heads) <= 100_000
        clients[2].writer.write(b"a" * 40_000)
        fleet.replicas[0].release.set()
        for client in clients:
            head = await client.head()
            assert head.startswith(b"HTTP/1.1 200 ")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r")[0])
            await client.reader.readexactly(length)
        for client in clients[2:]:
            assert await client.rest() == b"", "its connection ends: what came behind the request is dropped"
        for client in clients[:2]:
            client.writer.write(b"\r\n\r\n")
            assert (await client.head()).startswith(b"HTTP/1.1 200 ")
    await until(lambda: not sum(one.used_bytes for one in heads))
