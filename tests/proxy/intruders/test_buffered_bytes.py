"""Attacks on memory against a process: bytes are bounded in sum and by client, and others are served meanwhile."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest

from gorgo.live.http.body import STALLED_BYTES
from gorgo.live.upstream.client import UpstreamError
from tests.proxy.conftest import Start, config_for, until
from tests.proxy.fakes import DONE, ROLE, answer, chat, delta, hang, stream
from tests.proxy.raw import RawClient, connected
from tests.proxy.served import Served, served

#: Also on the HTTP of `gorgo serve --plain`.
IN_BOTH_FORMS = True
#: Where stock hypercorn and h11 differ: why, and the tests of it.
OWN_ALONE = {
    "hypercorn waits without end for a client that does not read": (
        "test_clients_that_do_not_read_are_bounded_in_sum",
        "test_answer_that_is_not_read_makes_way_for_a_body",
    ),
}

CHAT = "/v1/chat/completions"
MIB = 2**20
#: For one body of `SIZE`; 24 of them would take more than this and `BESIDE`.
BUDGET = 80 * MIB
#: The process itself, sockets' buffers, and what the allocator keeps.
BESIDE = 300 * MIB
SIZE = 16 * MIB
KEYS = ("team-a", "team-b")
BLANKS = b" " * 65_536


@asynccontextmanager
async def proxy(
    folder: Path, urls: Iterable[str], monkeypatch: pytest.MonkeyPatch, *, keys: bool = False, more: str = ""
) -> AsyncIterator[Served]:
    """A process with few bytes to buffer; nothing is buffered at the end, and it never took more memory."""
    monkeypatch.setenv("GORGO_INTERNAL_ROUTES", "1")
    rows = ", ".join(f"{{name: r{n}, region: a, url: '{url}', engine: sglang}}" for n, url in enumerate(urls))
    lines = [f"proxy: {{region: a, policy: round-robin{more}}}", "regions: [{name: a}]", f"replicas: [{rows}]"]
    lines.append(f"limits: {{max_buffered_bytes: {BUDGET}}}")
    if keys:
        (folder / "keys").write_text("".join(f"{key}:{sha256(key.encode()).hexdigest()}\n" for key in KEYS))
        lines.append(f"clients: {{keys_file: '{folder / 'keys'}'}}")
    (folder / "regions.yaml").write_text("\n".join(lines))
    async with served(folder) as running:
        yield running
        assert memory(running, "VmHWM") < BUDGET + BESIDE
        async with asyncio.timeout(10):
            while (inside := await checked(running))["exchanges"]:
                await asyncio.sleep(0.01)
        assert (inside["buffered_bytes"], inside["buffers"]) == (0, 0)


def memory(running: Served, name: str) -> int:
    status = Path(f"/proc/{running.process.pid}/status").read_text()
    found = re.search(rf"{name}:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


def address_of(running: Served) -> tuple[str, int]:
    return "127.0.0.1", running.client.base_url.port or 0


class Uploads:
    """Requests whose bodies never end: each sends `SIZE` bytes and stays, unless it is refused."""

    def __init__(self, running: Served, stack: AsyncExitStack) -> None:
        self._running = running
        self._stack = stack
        self.answers: list[bytes] = []

    async def start(self, count: int, *headers: str, chunked: bool = False, pieces: int = SIZE // 65_536) -> None:
        """Start `count`; return when all but one are answered: there is memory for one."""
        framing = "transfer-encoding: chunked" if chunked else f"content-length: {SIZE + 100}"
        lines = [f"POST {CHAT} HTTP/1.1", "host: g", framing, *headers]
        head = "\r\n".join(lines).encode() + b"\r\n\r\n"
        piece = b"%x\r\n%b\r\n" % (len(BLANKS), BLANKS) if chunked else BLANKS
        clients = [await self._stack.enter_async_context(connected(address_of(self._running))) for _ in range(count)]
        tasks = [asyncio.create_task(self._upload(client, head, [piece] * pieces)) for client in clients]
        self._stack.callback(lambda: [task.cancel() for task in tasks])
        await until(lambda: len(self.answers) >= count - 1, 30)
        assert (await checked(self._running))["buffered_bytes"] <= BUDGET // 2

    async def _upload(self, client: RawClient, head: bytes, pieces: Iterable[bytes]) -> None:
        answer = b""
        with suppress(ConnectionError):
            client.writer.write(head)
            for piece in pieces:
                client.writer.write(piece)
                await client.writer.drain()
            answer = await client.reader.read(4096)
        self.answers.append(answer)

    def statuses(self) -> set[bytes]:
        return {said[9:12] for said in self.answers}


async def checked(running: Served) -> dict[str, Any]:
    """What the process says of itself; no invariant is violated."""
    inside: dict[str, Any] = (await running.admin.get("/admin/check")).json()
    assert inside["violation"] is None
    return inside


async def from_another_address(running: Served) -> int:
    """Status of a small request of a client with another address."""
    transport = httpx.AsyncHTTPTransport(local_address="127.0.0.2")
    async with httpx.AsyncClient(transport=transport, base_url=running.client.base_url, timeout=5) as client:
        return (await client.post(CHAT, content=chat())).status_code


@pytest.mark.parametrize("chunked", [False, pytest.param(True, marks=pytest.mark.system)])
async def test_slow_uploads_without_a_key_are_bounded_and_another_address_is_served(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunked: bool
) -> None:
    replica = await start.replica(answer(200))
    async with proxy(tmp_path, [replica.url], monkeypatch) as running, AsyncExitStack() as stack:
        uploads = Uploads(running, stack)
        await uploads.start(24, chunked=chunked)
        assert uploads.statuses() == {b"503"}
        assert b"retry-after: 2" in uploads.answers[0].lower()
        assert await from_another_address(running) == 200


async def test_slow_uploads_with_one_key_leave_another_key_its_share(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = await start.replica(answer(200))
    async with proxy(tmp_path, [replica.url], monkeypatch, keys=True) as running, AsyncExitStack() as stack:
        uploads = Uploads(running, stack)
        await uploads.start(24, "authorization: Bearer team-a")
        assert uploads.statuses() == {b"503"}
        large = chat(text="x" * 8 * MIB)
        headers = {"authorization": "Bearer team-b"}
        assert (await running.client.post(CHAT, content=large, headers=headers)).status_code == 200


async def test_declared_lengths_make_way_when_nothing_comes(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = await start.replica(answer(200))
    async with proxy(tmp_path, [replica.url], monkeypatch) as running, AsyncExitStack() as stack:
        uploads = Uploads(running, stack)
        await uploads.start(200, pieces=1)
        large = chat(text="x" * 12 * MIB)
        async with asyncio.timeout(10):
            while (response := await running.client.post(CHAT, content=large)).status_code == 503:
                assert response.json()["error"]["code"] == "buffers_full"
                await asyncio.sleep(0.1)
        assert response.status_code == 200
        await until(lambda: len(uploads.answers) == 200)
        (evicted,) = (said for said in uploads.answers if said[9:12] == b"408")
        # On a busy machine the limit of an idle body comes first; either makes way.
        assert b"upload_evicted" in evicted or b"request_timeout" in evicted


async def test_body_that_could_never_be_buffered_is_a_413(start: Start) -> None:
    fleet = await start.fleet([answer(200)], max_buffered_bytes=40_000)
    assert (await fleet.client.post(CHAT, content=chat(text="x" * 9_000))).status_code == 200
    response = await fleet.client.post(CHAT, content=chat(text="x" * 11_000))
    assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")
    await fleet.idle()


async def test_reservation_ends_with_the_request_however_it_ends(start: Start) -> None:
    fleet = await start.fleet([answer(500), answer(200)], [answer(500), answer(200)], max_body_bytes=10_000)
    for content in (chat(), b"{", b'{"messages": 1}', b"x" * 20_000):
        await fleet.client.post(CHAT, content=content)
        await fleet.idle()
    async with connected(fleet.addresses.data) as client:
        await client.post(CHAT, chat()[:5], length=1000)
        await until(lambda: fleet.state.buffers.used_bytes == 2000)
        client.reset()
        await fleet.idle()


async def test_queued_and_open_requests_are_counted_until_they_end(start: Start) -> None:
    fleet = await start.fleet([hang(b"", rest=())])
    body = chat(stream=True)
    task = asyncio.create_task(fleet.client.post(CHAT, content=body))
    await fleet.replicas[0].arrived.wait()
    assert fleet.state.buffers.used_bytes == 2 * len(body)
    fleet.replicas[0].release.set()
    await task
    await fleet.idle()


async def test_clients_that_do_not_read_are_bounded_in_sum(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = [b"[" + b" " * 65_535, *[b" " * 65_536] * 510, b" " * 65_535 + b"]"]
    replica = await start.replica(stream(*pieces, headers={"content-type": "application/json"}))
    async with proxy(tmp_path, [replica.url], monkeypatch) as running, AsyncExitStack() as stack:
        for _ in range(150):
            client = await stack.enter_async_context(connected(address_of(running)))
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            await client.post(CHAT, chat())
        most, open_now = 0, 150
        async with asyncio.timeout(20):
            while most < BUDGET // 4 or open_now > BUDGET // 2 // STALLED_BYTES:
                inside = await checked(running)
                most, open_now = max(most, inside["buffered_bytes"]), inside["exchanges"]
                await asyncio.sleep(0.05)
        assert most <= BUDGET // 2
        async with asyncio.timeout(20):
            # Those that are left fill the client's share until their grace has passed.
            while (response := await running.client.post(CHAT, content=chat())).status_code == 503:
                assert response.json()["error"]["code"] == "buffers_full"
                await asyncio.sleep(0.1)
        assert (response.status_code, len(response.content)) == (200, 32 * MIB)


async def test_answer_that_is_not_read_makes_way_for_a_body(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("gorgo.core.limits", "gorgo.live.http.body"):
        monkeypatch.setattr(f"{module}.GRACE_S", 0.05)
    flood = tuple(delta("x" * 60_000) for _ in range(200))
    fleet = await start.fleet([hang(*flood, rest=(DONE,)), answer(200)], max_buffered_bytes=4 * MIB)
    async with connected(fleet.addresses.data) as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.post(CHAT, chat(stream=True))
        await until(lambda: fleet.state.buffers.client_bytes("address 127.0.0.1") > STALLED_BYTES)
        async with asyncio.timeout(10):
            # It needs more than what the proxy retains of the answer, which makes way first.
            while (await fleet.client.post(CHAT, content=chat(text="x" * 1_030_000))).status_code != 200:
                await asyncio.sleep(0.02)
        await until(lambda: len(fleet.state.exchanges) == 0)
        client.reset()
    fleet.replicas[0].release.set()
    await fleet.idle()


async def test_large_fetch_needs_memory_and_a_small_one_does_not(start: Start) -> None:
    replica = await start.replica(answer(200, b"x" * 300_000), answer(200, b"x" * 200_000), answer(200, b"x" * 300_000))
    fleet = await start.proxy(config_for([replica], max_buffered_bytes=1000), [replica])
    upstream = fleet.state.replicas.targets["r0"].upstream
    with pytest.raises(UpstreamError, match="answer_too_large"):
        await upstream.fetch("/large", timeout_s=5)
    assert len((await upstream.fetch("/small", timeout_s=5))[1]) == 200_000
    fleet.state.buffers.limit_bytes = 10_000_000
    assert len((await upstream.fetch("/large", timeout_s=5))[1]) == 300_000
    await fleet.idle()


@pytest.mark.parametrize("streamed", [True, False])
async def test_start_of_an_answer_without_memory_is_sent_as_it_is(start: Start, streamed: bool) -> None:
    kind = "text/event-stream" if streamed else "application/json"
    fleet = await start.fleet(
        [hang(ROLE if streamed else b"[1,", rest=(delta("a"), DONE), headers={"content-type": kind})]
    )
    body = chat(stream=streamed)
    fleet.state.buffers.limit_bytes = 2 * 2 * len(body)
    async with connected(fleet.addresses.data) as client:
        await client.post(CHAT, body)
        assert b" 200 " in await client.head()
        assert await client.reader.readuntil(b"role" if streamed else b"[1,")
        fleet.replicas[0].release.set()
        await client.reader.readuntil(b"[DONE]")
    await fleet.idle()


async def test_body_of_a_get_is_discarded_while_its_response_takes_long(start: Start) -> None:
    fleet = await start.fleet([hang(rest=(b"{}",))])
    async with connected(fleet.addresses.data) as client:
        client.writer.write(b"GET /v1/models HTTP/1.1\r\nhost: g\r\ncontent-length: %d\r\n\r\n" % (32 * MIB))
        try:
            async with asyncio.timeout(10):
                for _ in range(32 * MIB // len(BLANKS)):
                    client.writer.write(BLANKS)
                    await client.writer.drain()
            fleet.replicas[0].release.set()
            assert b" 200 " in await client.head()
        finally:
            client.reset()
