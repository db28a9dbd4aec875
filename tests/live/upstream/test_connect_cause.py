"""Why there was no connection, over real sockets, and where an operator reads it."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest

from gorgo.live.monitor.replica_monitor import ReplicaMonitor
from gorgo.live.upstream.address import connect_cause
from gorgo.live.upstream.client import UpstreamClient, UpstreamError
from tests.proxy.authority import Authority, engine, needs_openssl
from tests.proxy.conftest import Start, config_for, system_tls, with_replica
from tests.proxy.fakes import answer, chat


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
