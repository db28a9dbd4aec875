"""The client of replicas: another transport, what is set from outside, and why there was no connection."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import pytest

from gorgo.live.monitor.replica_monitor import ReplicaMonitor
from gorgo.live.replica_secrets import ReplicaSecrets
from gorgo.live.upstream.address import connect_cause
from gorgo.live.upstream.client import POOL_EXHAUSTED, UpstreamClient, UpstreamError
from gorgo.live.upstream.target import Target
from tests.proxy.authority import Authority, engine, needs_openssl
from tests.proxy.conftest import Start, config_for, system_tls, with_replica
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
