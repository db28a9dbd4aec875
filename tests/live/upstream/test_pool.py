"""Which connection a request takes, and how one is opened."""

from __future__ import annotations

import asyncio
import errno
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohappyeyeballs import start_connection

from gorgo.live.upstream import address, client
from gorgo.live.upstream import client as pool
from gorgo.live.upstream.address import Address
from gorgo.live.upstream.client import POOL_EXHAUSTED, UpstreamClient, UpstreamError
from tests.live.upstream.engine import OK, Speak, listening, whole
from tests.live.upstream.engine import engine as plain_engine
from tests.proxy.authority import Authority, engine, needs_openssl
from tests.proxy.conftest import system_tls, until

ON_BOTH_LOOPS = True


@needs_openssl
async def test_connections_opened_from_now_on_use_the_new_context_and_no_earlier_one(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with engine(authority.pair("engine"), None) as url:
        upstream = UpstreamClient(url, connections=4, connect_timeout_s=5.0, tls=system_tls())
        with pytest.raises(UpstreamError, match="connect_failed"):
            await upstream.fetch("/health", timeout_s=5.0)
        upstream.set_tls(authority.trusting())
        assert (await upstream.fetch("/health", timeout_s=5.0))[0] == 200
        await upstream.aclose()


def answering(served: list[int]) -> Speak:
    """An engine that appends the number of the connection to `served` at each request."""
    numbers = iter(range(100))

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = next(numbers)
        while True:
            await reader.readuntil(b"\r\n\r\n")
            served.append(number)
            await asyncio.sleep(0.01)
            writer.write(OK)

    return speak


async def test_the_connection_used_last_is_taken_first() -> None:
    served: list[int] = []
    async with plain_engine(answering(served)) as (upstream, found):
        sources = await asyncio.gather(*(upstream.open("/v1", [], b"") for _ in range(3)))
        for source in sources:
            await whole(source)
        assert (found.connections, upstream.connections) == (3, 3)
        last = await upstream.open("/v1", [], b"")
        await whole(last)
        for _ in range(3):
            await whole(await upstream.open("/v1", [], b""))
        assert len(set(served[3:])) == 1
        assert found.connections == 3


async def test_segments_of_a_request_are_not_delayed() -> None:
    async with plain_engine(answering([])) as (upstream, _):
        await whole(await upstream.open("/v1", [], b""))
        (connection,) = upstream._pool._open
        assert connection.transport is not None
        used = connection.transport.get_extra_info("socket")
        assert used.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_an_address_that_does_not_answer_delays_the_next_one_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first takes no connection: its backlog is full."""
    full = socket.socket()
    full.bind(("127.0.0.1", 0))
    full.listen(0)
    waiting = [socket.socket() for _ in range(4)]
    for one in waiting:
        one.setblocking(False)
        one.connect_ex(full.getsockname())
    loop, taken = asyncio.get_running_loop(), full.getsockname()
    async with listening(answering([])) as (url, found):
        port = httpx.URL(url).port

        addresses = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", place) for place in (taken, ("127.0.0.1", port))]
        real = loop.getaddrinfo

        async def resolve(host: str, *where: Any, **options: Any) -> Any:
            return addresses if host == "two.example" else await real(host, *where, **options)

        monkeypatch.setattr(loop, "getaddrinfo", resolve)
        monkeypatch.setattr(address, "ATTEMPT_DELAY_S", 0.02)
        upstream = UpstreamClient("http://two.example", connections=4, connect_timeout_s=5.0, tls=system_tls())
        assert await upstream.fetch("/health", timeout_s=5.0) == (200, b"ok")
        assert found.connections == 1
        await upstream.aclose()
    for one in (full, *waiting):
        one.close()


async def test_a_name_is_resolved_once_for_a_burst_and_anew_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    resolved: list[str] = []

    real = asyncio.get_running_loop().getaddrinfo

    async def resolve(host: str, *where: Any, **options: Any) -> Any:
        if host != "replica.example":  # uvloop resolves an address once more before it connects
            return await real(host, *where, **options)
        resolved.append(host)
        return await real("127.0.0.1", *where, **options)

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
    place = Address("replica.example", port)
    for _ in range(3):
        (await place.open_socket()).close()
    assert len(resolved) == 1
    listener.close()
    for expected in (1, 2):
        with pytest.raises(ConnectionRefusedError):
            await place.open_socket()
        assert len(resolved) == expected


async def test_a_handshake_that_stalls_is_within_the_connect_timeout() -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with listening(speak) as (url, found):
        upstream = UpstreamClient(
            url.replace("http:", "https:"), connections=1, connect_timeout_s=0.1, tls=system_tls()
        )
        with pytest.raises(UpstreamError, match="connect_timeout"):
            await upstream.open("/v1", [], b"")
        await until(lambda: found.open == 0)
        await upstream.aclose()


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.EMFILE, POOL_EXHAUSTED),
        (errno.ENFILE, POOL_EXHAUSTED),
        (errno.EACCES, "connect_failed"),
    ],
)
async def test_descriptors_that_this_process_lacks_are_no_failure_of_the_replica(
    number: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object, **__: object) -> socket.socket:
        raise OSError(number, "none")

    monkeypatch.setattr(address, "start_connection", fail)
    upstream = UpstreamClient("http://127.0.0.1:9", connections=1, connect_timeout_s=1.0, tls=system_tls())
    with pytest.raises(UpstreamError, match=reason):
        await upstream.open("/v1", [], b"")
    await upstream.aclose()


async def test_a_connection_opened_during_the_close_is_closed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    connecting, closed = asyncio.Event(), asyncio.Event()

    async def late(infos: list[object], **options: object) -> socket.socket:
        connecting.set()
        await closed.wait()
        return await start_connection(infos, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(address, "start_connection", late)
    async with plain_engine(answering([])) as (upstream, found):
        request = asyncio.create_task(upstream.open("/v1", [], b""))
        await connecting.wait()
        await upstream.aclose()
        closed.set()
        with pytest.raises(UpstreamError, match="disconnected"):
            await request
        await until(lambda: found.open == 0)


def test_a_lost_connection_was_stale_within_half_a_second_and_a_small_response_has_four_mebibytes() -> None:
    assert (pool.STALE_S, client.FETCH_LIMIT_BYTES) == (0.5, 4_194_304)
