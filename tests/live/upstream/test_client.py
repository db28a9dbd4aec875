"""The client of replicas: another transport, what is set from outside, and why there was no connection."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohappyeyeballs import start_connection

from gorgo.live.monitor.replica_monitor import ReplicaMonitor
from gorgo.live.replica_secrets import ReplicaSecrets
from gorgo.live.upstream import address, connection
from gorgo.live.upstream.address import MISSING_ANSWERS, Address, AddressRefusedError, connect_cause
from gorgo.live.upstream.client import FETCH_LIMIT_BYTES, POOL_EXHAUSTED, UpstreamClient, UpstreamError
from gorgo.live.upstream.target import Target
from gorgo.live.upstream.transport import PlainTransport
from tests.live.upstream.engine import OK, Speak, listening, whole
from tests.live.upstream.engine import engine as plain_engine
from tests.proxy.authority import Authority, engine, needs_openssl
from tests.proxy.conftest import Start, config_for, system_tls, until, with_replica
from tests.proxy.fakes import answer, chat

# --- The client over another transport than its pool: the same source, limits and words.


Answer = Callable[[httpx.Request], Coroutine[None, None, httpx.Response]]


class Body(httpx.AsyncByteStream):
    """Two chunks, then perhaps a failure."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure = failure
        self.closed = 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b"a"
        yield b"b"
        if self.failure is not None:
            raise self.failure

    async def aclose(self) -> None:
        self.closed += 1


def client(answer: Answer, *, connections: int = 1) -> UpstreamClient:
    return UpstreamClient(
        "http://replica:8000/base/",
        connections=connections,
        connect_timeout_s=2.5,
        tls=system_tls(),
        new_transport=lambda _: httpx.MockTransport(answer),
    )


async def test_request_and_response_pass_as_they_are() -> None:
    body = Body()
    requests: list[tuple[str, str, list[tuple[bytes, bytes]], bytes, object]] = []

    async def answer(request: httpx.Request) -> httpx.Response:
        timeout = request.extensions["timeout"]
        requests.append((request.method, str(request.url), request.headers.raw, await request.aread(), timeout))
        return httpx.Response(201, headers=[(b"X-A", b"1"), (b"X-A", b"2")], stream=body)

    upstream = client(answer)
    source = await upstream.open("/v1", [(b"a", b"b")], b"{}")
    assert (source.status, source.headers) == (201, [(b"X-A", b"1"), (b"X-A", b"2")])
    async with source.chunks() as chunks:
        assert [chunk async for chunk in chunks] == [b"a", b"b"]
    await source.aclose()
    await source.aclose()
    assert (body.closed, upstream.open_responses) == (1, 0)
    headers = [(b"Host", b"replica:8000"), (b"a", b"b"), (b"Content-Length", b"2")]
    assert requests == [("POST", "http://replica:8000/base/v1", headers, b"{}", {"connect": 2.5})]
    await upstream.aclose()


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (httpx.PoolTimeout("x"), POOL_EXHAUSTED),
        (httpx.ConnectTimeout("x"), "connect_timeout"),
        (httpx.ConnectError("x"), "connect_failed"),
        (httpx.ReadError("x"), "disconnected"),
        (httpx.RemoteProtocolError("x"), "protocol_error"),
    ],
)
async def test_failure_before_the_head_has_its_word(failure: Exception, reason: str) -> None:
    async def answer(_: httpx.Request) -> httpx.Response:
        raise failure

    upstream = client(answer)
    with pytest.raises(UpstreamError, match=reason):
        await upstream.open("/v1", [], b"")
    assert upstream.open_responses == 0
    await upstream.aclose()


async def test_body_that_breaks_off_is_a_lost_connection() -> None:
    async def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, stream=Body(httpx.ReadError("x")))

    upstream = client(answer)
    with pytest.raises(UpstreamError, match="disconnected"):
        await upstream.fetch("/metrics", timeout_s=5.0)
    assert upstream.open_responses == 0
    await upstream.aclose()


async def test_request_beyond_the_limit_is_rejected_until_a_response_is_closed() -> None:
    async def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, stream=Body())

    upstream = client(answer)
    first = await upstream.open("/v1", [], b"")
    with pytest.raises(UpstreamError, match=POOL_EXHAUSTED):
        await upstream.open("/v1", [], b"")
    assert await upstream.fetch("/health", timeout_s=5.0) == (200, b"ab")
    await first.aclose()
    await (await upstream.open("/v1", [], b"")).aclose()
    await upstream.aclose()


@pytest.mark.parametrize(("size", "fits"), [(4 << 20, True), ((4 << 20) + 1, False)])
async def test_a_small_response_has_at_most_four_mebibytes_in_all_its_chunks(size: int, fits: bool) -> None:
    whole = bytes(size)

    class Large(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            for at in range(0, size, 1 << 20):
                yield whole[at : at + (1 << 20)]

    async def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, stream=Large())

    upstream = client(answer)
    if fits:
        assert await upstream.fetch("/metrics", timeout_s=5.0) == (200, whole)
    else:
        with pytest.raises(UpstreamError, match="answer_too_large"):
            await upstream.fetch("/metrics", timeout_s=5.0)
    await upstream.aclose()


async def test_the_url_of_a_path_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []

    def parse(text: str) -> httpx.URL:
        parsed.append(text)
        return url(text)

    async def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, stream=Body())

    upstream, url = client(answer), httpx.URL
    monkeypatch.setattr("gorgo.live.upstream.client.httpx.URL", parse)
    for path in ("/v1", "/v1", "/v2", "/v1"):
        await (await upstream.open(path, [], b"")).aclose()
    assert parsed == ["http://replica:8000/base/v1", "http://replica:8000/base/v2"]
    await upstream.aclose()


# --- What is set from outside of a replica's connection, and what no log shows.


def test_the_key_is_in_no_log_and_counts_are_the_target_s_own() -> None:
    assert [field.name for field in fields(Target) if not field.init] == [
        "pushes",
        "kv_events_changed",
        "unused_reports",
        "streams",
        "found_engine",
        "connection_lost",
        "last_failure",
        "unconnected_pings",
        "active",
        "attempts",
        "cut_ends",
        "_drained",
    ]
    assert [field.name for field in fields(Target) if not field.repr] == [
        "pushes",
        "kv_events_changed",
        "connection_lost",
        "_drained",
    ]
    assert [field.name for field in fields(ReplicaSecrets) if field.repr] == []
    assert {field.name: field.default for field in fields(Target) if isinstance(field.default, int | None)} == {
        "request_usage": False,
        "kv_events": None,
        "unused_reports": None,
        "detects_engine": False,
        "found_engine": None,
        "last_failure": None,
        "unconnected_pings": 0,
        "active": 0,
        "attempts": 0,
        "cut_ends": 0,
    }


# --- Why there was no connection, over real sockets, and where an operator reads it.


async def cause_of(url: str) -> tuple[str, str | None]:
    upstream = UpstreamClient(url, connections=2, connect_timeout_s=5.0, tls=system_tls())
    try:
        with pytest.raises(UpstreamError) as caught:
            await upstream.fetch("/health", timeout_s=10.0)
        return caught.value.reason, caught.value.cause
    finally:
        await upstream.aclose()


def closed_port() -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return int(unused.getsockname()[1])


async def test_closed_port_is_a_refused_connection() -> None:
    assert await cause_of(f"http://127.0.0.1:{closed_port()}") == ("connect_failed", "connection refused")


@pytest.mark.parametrize(
    ("number", "cause"),
    [(socket.EAI_NONAME, "its name is not in DNS"), (socket.EAI_AGAIN, "DNS does not answer")],
)
async def test_name_that_is_not_found_is_said_as_such(number: int, cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def getaddrinfo(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(number, "a resolver's words")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo, raising=False)
    assert await cause_of("http://replica.invalid:8000") == ("connect_failed", cause)


@needs_openssl
async def test_certificate_of_an_unknown_authority_is_named(tmp_path: Path) -> None:
    async with engine(Authority(tmp_path).pair("engine"), None) as url:
        reason, cause = await cause_of(url)
    assert reason == "connect_failed"
    assert cause is not None
    assert cause.startswith("TLS certificate: ")
    assert "certificate" in cause.removeprefix("TLS certificate: ")


async def test_port_without_tls_is_a_failed_handshake(start: Start) -> None:
    replica = await start.replica(answer(200))
    reason, cause = await cause_of(replica.url.replace("http:", "https:"))
    assert reason == "connect_failed"
    assert cause is not None
    assert cause.startswith("TLS: ")


@pytest.mark.parametrize(
    ("failure", "cause"),
    [
        (OSError(errno.EHOSTUNREACH, "x"), "no route to the host"),
        (OSError(errno.ENETUNREACH, "x"), "no route to the host"),
        (ConnectionResetError(errno.ECONNRESET, "x"), "connection reset"),
        (TimeoutError(), "timeout"),
        (ssl.SSLError(1, "x"), "TLS: handshake failed"),
        (ExceptionGroup("all addresses", [OSError(errno.ECONNREFUSED, "x")]), "connection refused"),
        (OSError("x"), None),
        (ValueError("x"), None),
    ],
)
def test_each_kind_of_failure_has_its_words_however_deep_it_is(failure: Exception, cause: str | None) -> None:
    assert connect_cause(failure) == cause
    wrapped = httpx.ConnectError("x")
    wrapped.__cause__ = httpx.NetworkError("y")
    wrapped.__cause__.__context__ = failure
    assert connect_cause(wrapped) == cause


def test_chain_that_contains_itself_ends() -> None:
    one, other = ValueError(), ValueError()
    one.__cause__, other.__cause__ = other, one
    assert connect_cause(one) is None


async def test_cause_is_in_both_logs_and_in_the_status(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gorgo")
    good = await start.replica(answer(200))
    config = with_replica(config_for([good]), 0, url=f"http://127.0.0.1:{closed_port()}")
    fleet = await start.proxy(config, [good])
    assert (await fleet.client.post("/v1/chat/completions", content=chat())).status_code == 503
    await ReplicaMonitor(fleet.state, fleet.state.replicas.targets["r0"], spread=lambda: 0.5).probe()
    fields = {record.getMessage(): record.fields for record in caplog.records if hasattr(record, "fields")}
    assert (fields["request"]["error"], fields["request"]["cause"]) == ("connect_failed", "connection refused")
    assert fields["replica_does_not_answer"] == {
        "replica": "r0",
        "reason": "connect_failed",
        "cause": "connection refused",
    }
    (row,) = (await fleet.admin.get("/admin/status")).json()["replicas"]
    assert "(connection refused)" in row["reason"]


# --- Which connection a request takes, and how one is opened.


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
    assert (connection.STALE_S, FETCH_LIMIT_BYTES) == (0.5, 4_194_304)


class Names:
    """DNS of a test: the addresses of one name; `None` is no answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
        self.addresses: list[str] | None = list(addresses)
        self.asked = 0
        loop = asyncio.get_running_loop()
        real = loop.getaddrinfo

        async def resolve(host: str | bytes, port: int, *where: Any, **options: Any) -> Any:
            if host not in ("replica.example", b"replica.example"):
                return await real(host, port, *where, **options)
            self.asked += 1
            if self.addresses is None:
                raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in self.addresses]

        monkeypatch.setattr(loop, "getaddrinfo", resolve)


@asynccontextmanager
async def two_machines(old: str = "127.0.0.2", new: str = "127.0.0.3") -> AsyncIterator[tuple[int, dict[str, int]]]:
    """A server that answers on both, and the requests of each."""
    served = {old: 0, new: 0}
    open_now: set[asyncio.StreamWriter] = set()

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_now.add(writer)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                served[writer.get_extra_info("sockname")[0]] += 1
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        open_now.discard(writer)

    async with await asyncio.start_server(speak, old, 0) as first:
        port = first.sockets[0].getsockname()[1]
        async with await asyncio.start_server(speak, new, port):
            yield port, served
            await until(lambda: not open_now)


async def test_a_refused_address_gets_no_request_by_another_transport_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain form connects by httpx: what it connected to is checked before anything is sent."""
    Names(monkeypatch, "127.0.0.3")
    async with two_machines() as (port, served):
        url, tls = f"http://replica.example:{port}", system_tls()
        upstream = UpstreamClient(url, connections=4, connect_timeout_s=5.0, tls=tls, new_transport=PlainTransport)
        for _ in range(2):
            upstream.refuse_addresses({"127.0.0.3": "it is link-local"}.get)
            with pytest.raises(UpstreamError) as refused:
                await upstream.fetch("/health", timeout_s=5.0)
            assert isinstance(refused.value.__cause__, httpx.ConnectError)
            assert str(refused.value.__cause__) == "its name stands for another place: it is link-local"
            upstream.set_tls(tls)
        with pytest.raises(UpstreamError):
            await upstream.fetch("/health", timeout_s=5.0)
        assert served["127.0.0.3"] == 0
        upstream.refuse_addresses(None)
        assert (await upstream.fetch("/health", timeout_s=5.0))[0] == 200
        await upstream.aclose()


async def test_a_name_that_stands_for_a_refused_address_is_connected_to_nowhere_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who writes the zone of a source could send prompts and keys to the own machine, at once or later."""
    names = Names(monkeypatch, "127.0.0.3")
    async with two_machines() as (port, served):
        url = f"http://replica.example:{port}"
        upstream = UpstreamClient(url, connections=4, connect_timeout_s=5.0, tls=system_tls())
        upstream.refuse_addresses({"127.0.0.3": "it is link-local"}.get)
        assert upstream.checked_host == "replica.example"
        with pytest.raises(UpstreamError) as refused:
            await upstream.fetch("/health", timeout_s=5.0)
        words = "its name replica.example stands for another place: it is link-local"
        assert connect_cause(refused.value) == words
        names.addresses = ["127.0.0.3", "127.0.0.2"]
        assert (await upstream.fetch("/health", timeout_s=5.0))[0] == 200
        assert (upstream.checked_host, set(await upstream.resolve_name())) == ("127.0.0.2", {"127.0.0.2"})
        names.addresses = ["127.0.0.3"]  # the same name, later
        for _ in range(2 * MISSING_ANSWERS):
            with pytest.raises(AddressRefusedError):
                await upstream.resolve_name()
            assert (await upstream.fetch("/health", timeout_s=5.0))[0] == 200
        upstream.refuse_addresses({"127.0.0.2": "it is link-local", "127.0.0.3": "it is link-local"}.get)
        await upstream.aclose()
        with pytest.raises(UpstreamError):
            await upstream.fetch("/health", timeout_s=5.0)
        assert served == {"127.0.0.2": 1 + 2 * MISSING_ANSWERS, "127.0.0.3": 0}


async def test_name_that_moves_is_followed_by_requests_on_kept_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """They carried every request to the old address for as long as it answered."""
    names = Names(monkeypatch, "127.0.0.2")
    async with two_machines() as (port, served):
        upstream = UpstreamClient(
            f"http://replica.example:{port}", connections=4, connect_timeout_s=5.0, tls=system_tls()
        )
        moved: list[tuple[str, str]] = []
        upstream.on_replaced(lambda before, now: moved.append((before, now)))
        await upstream.fetch("/", timeout_s=5.0)
        names.addresses = ["127.0.0.3"]
        for _ in range(MISSING_ANSWERS - 1):
            await upstream.resolve_name()
            await upstream.fetch("/", timeout_s=5.0)
        assert (served, moved) == ({"127.0.0.2": 2, "127.0.0.3": 0}, []), "one answer without it is no proof"
        assert await upstream.resolve_name() == {"127.0.0.3"}
        await upstream.fetch("/", timeout_s=5.0)
        assert (served, moved) == ({"127.0.0.2": 2, "127.0.0.3": 1}, [("127.0.0.2", "127.0.0.3")])
        await upstream.aclose()


async def test_answer_in_progress_ends_on_the_address_that_left_and_its_connection_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = Names(monkeypatch, "127.0.0.2")
    async with two_machines() as (port, served):
        upstream = UpstreamClient(
            f"http://replica.example:{port}", connections=4, connect_timeout_s=5.0, tls=system_tls()
        )
        source = await upstream.open("/", [], b"x")
        names.addresses = ["127.0.0.3"]
        for _ in range(MISSING_ANSWERS):
            await upstream.resolve_name()
        async with source.chunks() as chunks:
            assert b"".join([chunk async for chunk in chunks]) == b"ok"
        await source.aclose()
        await upstream.fetch("/", timeout_s=5.0)
        assert served == {"127.0.0.2": 1, "127.0.0.3": 1}
        await upstream.aclose()


async def test_name_with_two_addresses_stays_with_one_until_that_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names(monkeypatch, "127.0.0.2", "127.0.0.3")
    place = Address("replica.example", 1)
    with socket.create_server(("127.0.0.2", 0)) as first:
        place.port = first.getsockname()[1]
        with socket.create_server(("127.0.0.3", place.port)):
            for order in (["127.0.0.2", "127.0.0.3"], ["127.0.0.3", "127.0.0.2"], ["127.0.0.3"]):
                names.addresses = order
                await place.resolve_name()
                connected = await place.open_socket()
                assert connected.getpeername()[0] == "127.0.0.2"
                assert not place.is_replaced("127.0.0.2")
                connected.close()
            first.close()
            connected = await place.open_socket()
            assert place.is_replaced(connected.getpeername()[0])
            assert place.peer == "127.0.0.3"
            connected.close()


async def test_request_never_waits_for_dns_while_an_address_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names(monkeypatch, "127.0.0.2")
    with socket.create_server(("127.0.0.2", 0)) as listener:
        place = Address("replica.example", listener.getsockname()[1])
        (await place.open_socket()).close()
        names.addresses, asked = None, names.asked
        with pytest.raises(socket.gaierror):
            await place.resolve_name()
        (await place.open_socket()).close()
        assert (names.asked, place.addresses) == (asked + 1, frozenset({"127.0.0.2"}))


def test_addresses_of_two_families_are_one_machine() -> None:
    place = Address("replica.example", 1)
    place._found = {(text, 1): ((2, 1, 6, "", (text, 1)), 0) for text in ("127.0.0.1", "::1")}
    assert [place.is_replaced(peer) for peer in ("::1", "127.0.0.1", "127.0.0.9")] == [False, False, True]
    assert (Address("10.0.0.1", 1).is_name, Address("fd00::1", 1).is_name, place.is_name) == (False, False, True)
