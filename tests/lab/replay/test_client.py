""""""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from gorgo.lab import replay_client as transport_module
from gorgo.lab.replay_client import PoolTransport, StreamReader
from tests.lab.replay.fake_router import DONE, ROLE, event, token, usage
from tests.live.upstream.engine import OK, Engine, Speak, listening
from tests.proxy.authority import Authority, needs_openssl
from tests.proxy.authority import engine as tls_engine
from tests.proxy.conftest import until


def read(*chunks: tuple[float, bytes]) -> StreamReader:
    reader = StreamReader()
    for now, chunk in chunks:
        reader.feed(chunk, now=now)
    return reader


def test_the_first_token_is_content_not_a_role_and_gaps_follow_it() -> None:
    end = usage(10, 4, 3) + DONE
    reader = read((1.0, ROLE), (2.0, token()), (2.5, token()), (2.75, token()), (9.0, end))
    assert reader.first_content_s == 2.0
    assert reader.gaps_s == [0.5, 0.25]
    assert reader.error() is None
    assert reader.usage is not None
    assert (reader.usage.prompt_tokens, reader.usage.cached_tokens, reader.usage.output_tokens) == (10, 4, 3)


@pytest.mark.parametrize("spaced", [False, True], ids=["compact", "spaced"])
def test_usage_and_the_end_are_no_token_gaps(spaced: bool) -> None:
    """Tokens at 2, 2.5 and 4 s make two gaps; usage at 7 s and the end at 9 s carry no token."""
    last = usage(10, 4, 3)
    if spaced:
        last = last.replace(b'":', b'": ')
    no_usage_yet = event({"choices": [{"index": 0, "delta": {"content": "abcd"}}], "usage": None})
    reader = read((2.0, token()), (2.5, no_usage_yet), (4.0, token()), (7.0, last), (9.0, DONE))
    assert reader.gaps_s == [0.5, 1.5]
    assert reader.usage is not None
    assert reader.usage.output_tokens == 3


def test_an_event_split_over_two_chunks_counts_when_it_is_whole() -> None:
    whole = token()
    assert read((1.0, whole[:9]), (2.0, whole[9:])).first_content_s == 2.0


@pytest.mark.parametrize(
    ("stream", "said"),
    [
        (ROLE + DONE, "no content"),
        (token(), "truncated"),
        (token() + event({"error": {"message": "x", "code": 502}}) + DONE, "stream error"),
        (token() + b'event: error\ndata: {"message":"x"}\n\n', "stream error"),
        (event({"error": {"message": "x", "code": 503}}), "stream error 503"),
        (b"", "no content"),
    ],
)
def test_a_stream_that_is_no_whole_answer_says_why(stream: bytes, said: str) -> None:
    error = read((1.0, stream)).error()
    assert error is not None
    assert error.startswith(said)


STOP = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})


@pytest.mark.parametrize("end", [STOP, usage(10, 4, 3), STOP + usage(10, 4, 3), DONE, b"data:[DONE]\n\n"])
def test_a_stream_is_whole_by_any_end_that_the_proxy_takes(end: bytes) -> None:
    for stream in (token() + token() + end, (token() + token() + end).replace(b"\n", b"\r\n")):
        assert read((1.0, stream)).error() is None
    assert read((1.0, token() + end), (2.0, b": ping\n\n" * 600)).error() is None


def test_a_token_with_a_running_usage_is_a_token() -> None:
    counted = {"choices": [{"index": 0, "delta": {"content": "a"}}], "usage": {"prompt_tokens": 9}}
    reader = read((1.0, event(counted)), (1.5, event(counted)), (1.75, event(counted)), (3.0, STOP), (4.0, DONE))
    assert reader.gaps_s == [0.5, 0.25]


def test_text_that_looks_like_an_end_or_a_usage_is_a_token() -> None:
    reader = read((1.0, token()), (1.5, token("[DONE]")), (1.75, token('"usage": {')), (2.0, DONE))
    assert reader.gaps_s == [0.5, 0.25]


@pytest.mark.parametrize(
    "error",
    [
        {"object": "error", "message": "x", "code": 500},
        {"message": "x", "error": {"code": 500}},
        {"error": {"message": "x", "code": 400}},
        {"type": "error", "error": {"type": "overloaded_error"}},
    ],
)
def test_an_error_event_of_any_form_is_an_error(error: object) -> None:
    assert str(read((1.0, token() + event(error) + DONE)).error()).startswith("stream error")


def test_text_that_looks_like_an_error_event_is_text() -> None:
    assert read((1.0, token('\ndata: {"error": 1}\nevent: error') + DONE)).error() is None


ON_BOTH_LOOPS = True


@asynccontextmanager
async def client(
    speak: Speak, *, timeout: httpx.Timeout | None = None, keep_alive_s: float = 4.0
) -> AsyncIterator[tuple[httpx.AsyncClient, Engine]]:
    async with listening(speak) as (url, found):
        transport = PoolTransport(keep_alive_s=keep_alive_s)
        async with httpx.AsyncClient(transport=transport, base_url=url, timeout=timeout) as http:
            yield http, found


def answering(response: bytes, received: list[bytes] | None = None) -> Speak:
    """An engine with the same response to each request, whose heads it appends to `received`."""

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            if received is not None:
                received.append(head)
            for line in head.lower().split(b"\r\n"):
                if line.startswith(b"content-length: "):
                    await reader.readexactly(int(line[16:]))
            writer.write(response)

    return speak


async def test_requests_of_httpx_share_a_connection() -> None:
    received: list[bytes] = []
    async with client(answering(OK, received)) as (http, found):
        for _ in range(2):
            response = await http.post("/v1?a=b", json={"a": 1}, headers={"x-y": "z"})
            assert (response.status_code, response.text, response.http_version) == (200, "ok", "HTTP/1.1")
        assert found.connections == 1
    assert received[0].startswith(b"POST /v1?a=b HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"\r\nx-y: z\r\n" in received[0]


async def test_a_body_that_is_generated_is_sent_with_its_length() -> None:
    received: list[bytes] = []

    async def parts() -> AsyncIterator[bytes]:
        yield b"a" * 1000
        yield b"b" * 1000

    async with client(answering(OK, received)) as (http, _):
        assert (await http.post("/", content=parts())).text == "ok"
    assert b"content-length: 2000\r\n" in received[0].lower()
    assert b"transfer-encoding" not in received[0].lower()


async def test_a_generated_body_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_module, "MAX_BODY_BYTES", 1500)

    async def parts() -> AsyncIterator[bytes]:
        yield b"a" * 1000
        yield b"b" * 1000

    async with client(answering(OK)) as (http, found):
        with pytest.raises(httpx.LocalProtocolError, match="more than 1500 bytes"):
            await http.post("/", content=parts())
        assert found.connections == 0


async def test_a_response_to_head_has_no_body_and_the_next_request_a_new_connection() -> None:
    async with client(answering(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n")) as (http, found):
        response = await http.head("/")
        assert (response.status_code, response.content, response.headers["content-length"]) == (200, b"", "2")
        await until(lambda: found.open == 0)
        assert (await http.head("/")).status_code == 200
        assert found.connections == 2


@pytest.mark.parametrize("status", [b"204 None", b"304 Same"])
async def test_responses_without_a_body_leave_their_connection_usable(status: bytes) -> None:
    async with client(answering(b"HTTP/1.1 " + status + b"\r\n\r\n")) as (http, found):
        for _ in range(2):
            assert (await http.get("/")).content == b""
        assert found.connections == 1


async def test_a_body_may_end_with_the_connection() -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nuntil the end")
        await writer.drain()
        writer.write_eof()
        await reader.read()

    async with client(speak) as (http, _):
        assert (await http.get("/")).text == "until the end"


async def test_a_header_that_would_be_two_is_refused() -> None:
    async with client(answering(OK)) as (http, found):
        with pytest.raises(httpx.LocalProtocolError, match="control character"):
            await http.get("/", headers=[(b"a", b"b\r\nc: d")])
        assert found.connections == 0


async def test_no_head_within_the_read_timeout() -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with client(speak, timeout=httpx.Timeout(0.5)) as (http, found):
        with pytest.raises(httpx.ReadTimeout):
            await http.get("/")
        await until(lambda: found.open == 0)


async def test_no_bytes_of_a_body_within_the_read_timeout() -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n12345")
        await reader.read()

    async with client(speak, timeout=httpx.Timeout(0.5)) as (http, found):
        with pytest.raises(httpx.ReadTimeout, match="no bytes within"):
            await http.get("/")
        await until(lambda: found.open == 0)


async def test_a_port_without_a_listener_is_a_connect_error() -> None:
    async with client(answering(OK)) as (_, found):
        pass
    async with httpx.AsyncClient(transport=PoolTransport()) as http:
        with pytest.raises(httpx.ConnectError):
            await http.get("http://127.0.0.1:1/")
        with pytest.raises(httpx.UnsupportedProtocol):
            await http.get("ftp://127.0.0.1/")
    assert found.connections == 0


async def test_an_idle_connection_expires_and_is_closed() -> None:
    async with client(answering(OK), keep_alive_s=0.05) as (http, found):
        assert (await http.get("/")).text == "ok"
        await until(lambda: found.open == 0)
        assert (await http.get("/")).text == "ok"
        assert found.connections == 2


async def test_streams_left_early_close_their_connections() -> None:
    response = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n"
    async with client(answering(response)) as (http, found):
        async with http.stream("GET", "/") as got:
            assert [chunk async for chunk in _first(got)] == [b"a"]
        await until(lambda: found.open == 0)


async def _first(response: httpx.Response) -> AsyncIterator[bytes]:
    async for chunk in response.aiter_raw():
        yield chunk
        return


@needs_openssl
async def test_tls_needs_an_authority_and_may_need_a_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with tls_engine(authority.pair("engine"), authority.ca) as url:
        context = authority.trusting()
        context.load_cert_chain(*authority.pair("client"))
        async with httpx.AsyncClient(transport=PoolTransport(tls=context)) as http:
            assert (await http.get(url)).json() == {"safe": True}
            assert (await http.post(url, content=bytes(1 << 20))).json() == {"safe": True}
        async with httpx.AsyncClient(transport=PoolTransport(tls=authority.trusting())) as http:
            with pytest.raises((httpx.ConnectError, httpx.ReadError)):
                await http.get(url)
        async with httpx.AsyncClient(transport=PoolTransport()) as http:
            with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
                await http.get(url)


@needs_openssl
async def test_a_large_response_over_tls_waits_for_a_slow_reader(tmp_path: Path) -> None:
    size = 4 << 20
    authority = Authority(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*authority.pair("engine"))

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        for start in range(0, size, 1 << 16):
            writer.write(bytes([start >> 16]) * (1 << 16))
            await writer.drain()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(speak, "127.0.0.1", 0, ssl=context)
    async with server, httpx.AsyncClient(transport=PoolTransport(tls=authority.trusting())) as http:
        port = server.sockets[0].getsockname()[1]
        body = bytearray()
        async with http.stream("GET", f"https://127.0.0.1:{port}/") as response:
            async for chunk in response.aiter_raw():
                body += chunk
                await asyncio.sleep(0)
    assert len(body) == size
    assert all(body[start] == start >> 16 for start in range(0, size, 1 << 16))
