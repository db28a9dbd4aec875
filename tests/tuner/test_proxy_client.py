"""Requests to a proxy's admin API as they are sent, and what becomes of its answers."""

from __future__ import annotations

import errno
import io
import json
from typing import Any

import httpx
import pytest
from rich.console import Console

from gorgo.errors import ProxyRefused, ProxyUnreachable
from tuner.proxy_client import MAX_ANSWER_BYTES, MAX_SAMPLES, MAX_TEXT, TIMEOUT_S, ProxyClient, ProxyWeights
from tuner.sidecar.progress import LinePrinter

WEIGHTS: dict[str, Any] = {"policy": "gorgo", "version": 3, "weights": {"w_rtt": 1}}
SAMPLES: dict[str, Any] = {"boot_id": "b", "first_seq": 1, "last_seq": 2, "samples": [{"seq": 2, "replica": "a"}]}


class Proxy:
    def __init__(self, answer: httpx.Response | Exception) -> None:
        self.answer = answer
        self.requests: list[tuple[str, str, Any]] = []
        self.headers: list[httpx.Headers] = []

    def client(self, token: str | None = "t") -> ProxyClient:
        return ProxyClient("http://proxy/", token, transport=httpx.MockTransport(self.handle))

    def handle(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else None
        self.requests.append((request.method, str(request.url), body))
        self.headers.append(request.headers)
        assert set(request.extensions["timeout"].values()) == {10.0}
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def answers(document: object) -> Proxy:
    return Proxy(httpx.Response(200, json=document))


async def test_each_call_is_sent_as_the_admin_api_has_it() -> None:
    proxy = answers(WEIGHTS | {"frozen": None, "history": [{"source": "admin", "by": "mara"}]})
    async with proxy.client() as client:
        assert await client.weights() == ProxyWeights("gorgo", 3, {"w_rtt": 1.0}, None, "admin", "mara")
        await client.routing()
        await client.put_weights({"w_rtt": 2.0}, expected_version=3, reason="r" * 1001, by="me")
        await client.put_weights({}, expected_version=4, reason="r", by="me", allow_out_of_range=True)
        await client.freeze(reason="r", by="me")
        await client.freeze(reason="r", by="me", weights={"w_rtt": 2.0}, allow_out_of_range=True)
    change = {"reason": "r", "by": "me"}
    assert proxy.requests == [
        ("GET", "http://proxy/admin/weights", None),
        ("GET", "http://proxy/admin/policy", None),
        (
            "PUT",
            "http://proxy/admin/weights",
            {"weights": {"w_rtt": 2.0}, "expected_version": 3, "reason": "r" * 1000, "by": "me"},
        ),
        (
            "PUT",
            "http://proxy/admin/weights",
            {"weights": {}, "expected_version": 4, "allow_out_of_range": True} | change,
        ),
        ("POST", "http://proxy/admin/freeze", change),
        ("POST", "http://proxy/admin/freeze", change | {"weights": {"w_rtt": 2.0}, "allow_out_of_range": True}),
    ]
    assert {headers["authorization"] for headers in proxy.headers} == {"Bearer t"}


async def test_samples_are_asked_for_by_the_thousand() -> None:
    proxy = answers(SAMPLES)
    async with proxy.client(token=None) as client:
        batch = await client.samples(7)
    assert (batch.boot_id, batch.first_seq, batch.last_seq, batch.samples) == ("b", 1, 2, tuple(SAMPLES["samples"]))
    assert proxy.requests == [("GET", "http://proxy/admin/samples?after=7&limit=1000", None)]
    assert "authorization" not in proxy.headers[0]


@pytest.mark.parametrize(
    ("answer", "frozen", "source", "by"),
    [
        ({}, None, None, None),
        ({"frozen": {"reason": "weekend"}, "history": []}, "weekend", None, None),
        ({"frozen": {"reason": None}}, "no reason was given", None, None),
        ({"frozen": True, "history": [{"by": "a"}, {"source": "freeze"}]}, "no reason was given", "freeze", None),
    ],
)
async def test_why_weights_are_frozen_and_who_set_them_may_be_unknown(
    answer: dict[str, Any], frozen: str | None, source: str | None, by: str | None
) -> None:
    async with answers(WEIGHTS | answer).client() as client:
        assert await client.weights() == ProxyWeights("gorgo", 3, {"w_rtt": 1.0}, frozen, source, by)


@pytest.mark.parametrize(
    ("response", "status", "words"),
    [
        (httpx.Response(409, json={"error": {"message": "frozen"}}), 409, "GET http://proxy/admin/policy: 409 frozen"),
        (httpx.Response(502, text="x" * 300), 502, f"GET http://proxy/admin/policy: 502 {'x' * 200}"),
        (httpx.Response(500, json=[]), 500, "GET http://proxy/admin/policy: 500 []"),
    ],
)
async def test_an_error_is_refused_with_its_status_and_words(response: httpx.Response, status: int, words: str) -> None:
    async with Proxy(response).client() as client:
        with pytest.raises(ProxyRefused) as raised:
            await client.routing()
    assert (raised.value.status, str(raised.value)) == (status, words)


async def test_no_answer_is_unreachable_and_says_where() -> None:
    async with Proxy(httpx.ConnectError("refused")).client() as client:
        with pytest.raises(ProxyUnreachable, match=r"^GET http://proxy/admin/policy: ConnectError refused$"):
            await client.routing()


@pytest.mark.parametrize("document", [[], {}, WEIGHTS | {"weights": []}, WEIGHTS | {"version": "x"}])
async def test_an_answer_of_something_else_has_no_weights_and_no_samples(document: object) -> None:
    async with answers(document).client() as client:
        with pytest.raises(ProxyRefused, match="gorgo proxy"):
            await client.weights()
        with pytest.raises(ProxyRefused, match="gorgo proxy"):
            await client.samples(0)


@pytest.mark.parametrize(("size", "fits"), [(10 << 20, True), ((10 << 20) + 1, False)])
async def test_an_answer_has_at_most_ten_mebibytes(size: int, fits: bool) -> None:
    async with Proxy(httpx.Response(200, content=json.dumps(WEIGHTS).encode().ljust(size))).client() as client:
        if fits:
            assert (await client.routing()).version == 3
        else:
            with pytest.raises(ProxyRefused, match="no JSON object"):
                await client.routing()


def test_bounds_are_the_proxy_s_own() -> None:
    from gorgo.live.admin import app, calls

    assert (MAX_SAMPLES, MAX_TEXT) == (app.MAX_SAMPLES, calls.MAX_TEXT) == (1000, 1000)
    assert (TIMEOUT_S, MAX_ANSWER_BYTES) == (10.0, 10_485_760)


# --- The sidecar's output where it cannot be written.


class FullDisk(io.StringIO):
    refused = 0

    def write(self, _text: str) -> int:
        self.refused += 1
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_log_on_a_full_disk_loses_lines_and_does_not_end_the_campaign(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FullDisk()
    printer = LinePrinter()
    monkeypatch.setattr(printer, "_out", Console(file=disk))
    printer.say("generation 1 accepted")
    assert disk.refused
