"""The client over another transport than its pool: the same source, limits and words."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine

import httpx
import pytest

from gorgo.live.upstream.client import POOL_EXHAUSTED, UpstreamClient, UpstreamError
from tests.proxy.conftest import system_tls

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
