"""Engines whose answers are not what they say: the next replica's answer, a whole answer, or an error that shows."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import pytest

from gorgo.config.fleet import ReplicaConfig
from gorgo.config.model import Config, LimitsConfig, RegionConfig
from tests.proxy.conftest import QUIET, Running, Start
from tests.proxy.fakes import DONE, ROLE, answer, chat, delta, stream
from tests.proxy.integrity.engines import Liar, Speaker, forever, lying, peak_growth, says
from tests.proxy.raw import connected

#: Also on the HTTP of `gorgo serve --plain`.
IN_BOTH_FORMS = True

CHAT = "/v1/chat/completions"
OK = b"HTTP/1.1 200 OK\r\n"
SSE = OK + b"content-type: text/event-stream\r\n"
JSON = OK + b"content-type: application/json\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
GOOD = delta("good")
PACKED = gzip.compress(b'{"choices": []}')


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


END = b"0\r\n\r\n"


def whole(body: bytes) -> Speaker:
    return says(JSON + b"content-length: %d\r\n\r\n" % len(body) + body)


class Fleet:
    """One proxy over one liar, with an honest replica behind it or without."""

    def __init__(self, start: Start, stack: AsyncExitStack) -> None:
        self._start = start
        self._stack = stack

    async def __call__(self, speak: Speaker, *, honest: bool = True, **limits: float) -> tuple[Running, Liar]:
        liar = await self._stack.enter_async_context(lying(speak))
        rows = [ReplicaConfig(name="liar", region="here", url=liar.url, engine="openai")]
        replicas = []
        if honest:
            replicas.append(await self._start.replica(answer(200, b'{"honest": 1}')))
            rows.append(ReplicaConfig(name="honest", region="here", url=replicas[0].url, engine="openai"))
        bounds = LimitsConfig(shutdown_grace_s=1.0, **limits)  # type: ignore[arg-type] # whole numbers and others
        config = Config(proxy=QUIET, regions=(RegionConfig(name="here"),), replicas=tuple(rows), limits=bounds)
        return await self._start.proxy(config, replicas), liar


@pytest.fixture
async def fleet(start: Start) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        yield Fleet(start, stack)


@pytest.fixture(autouse=True)
def _no_fault_of_our_own(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    # Not `caplog.records`: those are of the phase that has begun by now, and there are none.
    assert [record for record in caplog.get_records("call") if record.levelno >= logging.ERROR] == []


WHOLE_ANSWER = b'{"choices": [{"message": {"content": "a b c"}}], "usage": {"completion_tokens": 3}}'
#: Answers that end before anything could be believed: another replica answers instead.
WITHHELD = {
    "fewer bytes than the length": says(JSON + b"content-length: 100\r\n\r\n{}", close=True),
    "a chunk that never ends": says(JSON + CHUNKED + b"ff\r\n{}", close=True),
    "a chunk size that is none": says(JSON + CHUNKED + b"zz\r\n{}\r\n0\r\n\r\n"),
    "a negative chunk size": says(JSON + CHUNKED + b"-2\r\n{}\r\n0\r\n\r\n"),
    "a chunk size beyond all memory": says(JSON + CHUNKED + b"f" * 40 + b"\r\n{}"),
    "a chunk longer than its size": says(JSON + CHUNKED + b"1\r\n{}\r\n0\r\n\r\n"),
    "chunks without their end": says(JSON + CHUNKED + chunk(b"{}"), close=True),
    "no status line": says(b"hello\r\n\r\n", close=True),
    "a status of letters": says(b"HTTP/1.1 abc OK\r\ncontent-length: 0\r\n\r\n"),
    "a status of two digits": says(b"HTTP/1.1 20 OK\r\ncontent-length: 0\r\n\r\n"),
    "status 101": says(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nxxxx"),
    "status 000": says(b"HTTP/1.1 000 Nothing\r\ncontent-length: 2\r\n\r\n{}"),
    "status 999": says(b"HTTP/1.1 999 Much\r\ncontent-length: 2\r\n\r\n{}"),
    "two lengths": says(JSON + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}}"),
    "a length with a sign": says(JSON + b"content-length: +2\r\n\r\n{}"),
    "a negative length": says(JSON + b"content-length: -2\r\n\r\n{}"),
    "a length and a coding": says(JSON + b"content-length: 1\r\n" + CHUNKED + chunk(b"{}") + END),
    "a body that is packed for this hop": says(JSON + b"transfer-encoding: gzip\r\n\r\n" + PACKED, close=True),
    "chunks that are packed for this hop": says(
        JSON + b"transfer-encoding: gzip, chunked\r\n\r\n" + chunk(PACKED) + END
    ),
    "two codings on two lines": says(JSON + b"transfer-encoding: gzip\r\n" + CHUNKED + chunk(PACKED) + END),
    "an event stream that is packed for this hop": says(
        SSE + b"transfer-encoding: deflate, chunked\r\n\r\n" + chunk(GOOD) + END
    ),
    "a header that never ends": forever(OK + b"x-a: ", b"a" * 16_384),
    "headers that never end": forever(OK, b"x-a: b\r\n" * 512),
    "a header without a colon": says(OK + b"nonsense\r\ncontent-length: 2\r\n\r\n{}"),
    "a NUL in a header": says(OK + b"x-a: \x00\r\ncontent-length: 2\r\n\r\n{}"),
    "nothing": says(close=True),
    "another replica's address": says(
        b"HTTP/1.1 307 Go\r\nlocation: http://169.254.169.254/\r\ncontent-length: 0\r\n\r\n"
    ),
    "a redirect to a file": says(b"HTTP/1.1 302 Go\r\nlocation: file:///etc/passwd\r\ncontent-length: 0\r\n\r\n"),
    "an event stream without events": says(SSE + CHUNKED + END),
    "an event stream that breaks before content": says(SSE + CHUNKED + chunk(ROLE), close=True),
    "an event stream that says an error": says(SSE + CHUNKED + chunk(b'data: {"error": {"code": 500}}\n\n') + END),
}


@pytest.mark.parametrize(
    "lie",
    [
        "fewer bytes than the length",
        "chunks that are packed for this hop",
        "status 101",
        "headers that never end",
        "two lengths",
        "another replica's address",
    ],
)
async def test_answer_that_cannot_be_believed_is_replaced(fleet: Fleet, lie: str) -> None:
    running, liar = await fleet(WITHHELD[lie], first_token_timeout_s=1.0)
    for _ in range(4):
        response = await running.client.post(CHAT, content=chat(stream=True))
        assert (response.status_code, response.content) == (200, b'{"honest": 1}')
        assert response.headers["x-gorgo-replica"] == "honest"
    assert liar.posts >= 1
    await running.idle()


async def test_answer_that_cannot_be_replaced_is_a_clear_error(fleet: Fleet) -> None:
    running, liar = await fleet(says(), honest=False, first_token_timeout_s=1.0)
    for lie, speak in WITHHELD.items():
        liar.speak = speak
        response = await running.client.post(CHAT, content=chat(stream=True))
        assert response.status_code in (502, 503, 504), lie
        assert response.json()["error"]["type"] == "server_error", lie
        assert "location" not in response.headers, lie
    await running.idle()


@pytest.mark.parametrize(
    ("lie", "streamed"),
    [
        (whole(b'{"object": "chat.completion", "id": "x"}'), False),
        (says(SSE + CHUNKED + chunk(DONE) + END), True),
    ],
    ids=["JSON without choices", "[DONE] alone"],
)
async def test_few_clients_see_answers_without_an_answer_while_the_other_kind_goes_well(
    fleet: Fleet, lie: Speaker, streamed: bool
) -> None:
    good = {True: says(SSE + CHUNKED + chunk(GOOD * 3 + DONE) + END), False: whole(WHOLE_ANSWER)}
    running, liar = await fleet(lie)
    running.replicas[0].scripts[:] = [answer(200, WHOLE_ANSWER)]
    seen = 0
    for _ in range(12):
        for kind in (True, False):
            liar.speak = lie if kind is streamed else good[kind]
            response = await running.client.post(CHAT, content=chat(stream=kind))
            assert response.status_code == 200
            bad = response.headers["x-gorgo-replica"] == "liar" and kind is streamed
            seen += bad
    assert liar.posts >= 3
    assert seen <= 3
    await running.idle()


#: Answers that are strange but whole: passed as they are.
PASSED: dict[str, tuple[Speaker, int, bytes]] = {
    "no usage": (says(JSON + b'content-length: 15\r\n\r\n{"choices": []}'), 200, b'{"choices": []}'),
    "usage of nonsense": (says(JSON + b'content-length: 13\r\n\r\n{"usage": []}\n'), 200, b'{"usage": []}'),
    "no JSON": (says(JSON + b"content-length: 3\r\n\r\n\xff\xfe\x00"), 200, b"\xff\xfe\x00"),
    "until the connection ends": (says(JSON + b"\r\n{}", close=True), 200, b"{}"),
    "informed before": (says(b"HTTP/1.1 100 Continue\r\n\r\n" * 3 + JSON + b"content-length: 2\r\n\r\n{}"), 200, b"{}"),
    "early hints before": (
        says(b"HTTP/1.1 103 Hints\r\nlink: x\r\n\r\n" + JSON + b"content-length: 2\r\n\r\n{}"),
        200,
        b"{}",
    ),
    "no content": (says(b"HTTP/1.1 204 None\r\n\r\n"), 204, b""),
    "an odd 4xx": (says(b"HTTP/1.1 418 I'm a teapot\r\ncontent-length: 2\r\n\r\n{}"), 418, b"{}"),
    "a number beyond all": (
        whole(b'{"usage": {"prompt_tokens": 1e999999}}'),
        200,
        b'{"usage": {"prompt_tokens": 1e999999}}',
    ),
    "a number of many digits": (
        whole(b'{"usage": {"prompt_tokens": %b}}' % (b"9" * 5000)),
        200,
        b'{"usage": {"prompt_tokens": %b}}' % (b"9" * 5000),
    ),
    "a whole number of 400 digits": (
        whole(b'{"usage": {"prompt_tokens": 3, "completion_tokens": 1%b}}' % (b"0" * 400)),
        200,
        b'{"usage": {"prompt_tokens": 3, "completion_tokens": 1%b}}' % (b"0" * 400),
    ),
    "a count beyond all counting": (
        whole(b'{"usage": {"prompt_tokens": 1%b}}' % (b"0" * 300)),
        200,
        b'{"usage": {"prompt_tokens": 1%b}}' % (b"0" * 300),
    ),
    "a negative count": (whole(b'{"usage": {"prompt_tokens": -7}}'), 200, b'{"usage": {"prompt_tokens": -7}}'),
    "another version": (says(b"HTTP/2.0 200 OK\r\ncontent-length: 2\r\n\r\n{}", close=True), 200, b"{}"),
    "deep nesting": (says(JSON + b"content-length: 50000\r\n\r\n" + b"[" * 50_000), 200, b"[" * 50_000),
    "an event in another coding": (
        says(SSE + CHUNKED + chunk(b"data: \xff\xfe\n\n") + chunk(GOOD + DONE) + END),
        200,
        b"data: \xff\xfe\n\n" + GOOD + DONE,
    ),
    "a line without its end": (
        says(SSE + CHUNKED + chunk(GOOD + b"data: ") + chunk(b"x" * 200_000) + END),
        200,
        GOOD + b"data: " + b"x" * 200_000,
    ),
    "trailers": (says(JSON + CHUNKED + chunk(b"{}") + b"0\r\nx-trailer: 1\r\nset-cookie: a=b\r\n\r\n"), 200, b"{}"),
    "an extension of a chunk": (says(JSON + CHUNKED + b"2;name=value\r\n{}\r\n0\r\n\r\n"), 200, b"{}"),
}


async def test_answer_that_is_only_strange_passes_as_it_is(fleet: Fleet) -> None:
    running, liar = await fleet(says(), honest=False)
    for lie, (speak, status, body) in PASSED.items():
        liar.speak = speak
        response = await running.client.post(CHAT, content=chat())
        assert (response.status_code, response.content) == (status, body), lie
        assert not {"x-trailer", "set-cookie", "link"} & set(response.headers), lie
    assert (await running.admin.get("/admin/status")).status_code == 200
    await running.idle()


async def test_answer_without_content_tells_no_length(fleet: Fleet) -> None:
    running, _ = await fleet(says(b"HTTP/1.1 204 None\r\ncontent-length: 5\r\n\r\n"), honest=False)
    for _ in range(2):  # the connection goes on where it should
        response = await running.client.post(CHAT, content=chat())
        assert (response.status_code, "content-length" in response.headers) == (204, False)
    await running.idle()


async def test_odd_header_value_of_an_engine_is_no_fault_of_ours(fleet: Fleet) -> None:
    running, liar = await fleet(says(), honest=False)
    for value in (b"a\x0bb", b"a\x0cb", b"a\x01b", b"\x7f", b"\xff\xfe", b" ", b"", b"a\tb"):
        liar.speak = says(JSON + b"x-model: " + value + b"\r\ncontent-length: 2\r\n\r\n{}")
        async with connected(running.addresses.data) as client:
            await client.post(CHAT, chat(), "connection: close")
            said = await client.rest()
        assert said.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 502 ")), value
    await running.idle()


async def test_bytes_beyond_the_length_are_not_the_next_answer(fleet: Fleet) -> None:
    second = JSON + b"content-length: 8\r\n\r\npoisoned"
    running, liar = await fleet(says(JSON + b"content-length: 2\r\n\r\n{}" + second), honest=False)
    for _ in range(3):
        response = await running.client.post(CHAT, content=chat())
        assert b"poisoned" not in response.content
        assert response.content == b"{}"
    assert liar.posts == 3
    await running.idle()


async def test_answer_that_nobody_asked_for_is_not_the_next_one(fleet: Fleet) -> None:
    late = asyncio.Event()

    async def speak(writer: asyncio.StreamWriter) -> None:
        writer.write(JSON + b"content-length: 2\r\n\r\n{}")
        await writer.drain()
        await asyncio.sleep(0.02)
        writer.write(JSON + b"content-length: 8\r\n\r\npoisoned")
        late.set()

    running, _ = await fleet(speak, honest=False)
    for _ in range(3):
        late.clear()
        assert (await running.client.post(CHAT, content=chat())).content == b"{}"
        await late.wait()
    await running.idle()


async def test_gzip_that_was_not_asked_for_passes_unread(fleet: Fleet) -> None:
    packed = gzip.compress(b'{"usage": {"prompt_tokens": 7}}')
    head = JSON + b"content-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(packed)
    running, liar = await fleet(says(head + packed), honest=False)
    async with connected(running.addresses.data) as client:
        await client.post(CHAT, chat(), "connection: close")
        said = await client.rest()
    assert said.partition(b"\r\n\r\n")[2] == packed
    assert b"accept-encoding: identity\r\n" in liar.heard[0].lower()


async def test_gzip_bomb_is_never_unpacked(fleet: Fleet) -> None:
    bomb = gzip.compress(b"\0" * (64 << 20))
    head = SSE + b"content-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(bomb)
    running, _ = await fleet(says(head + bomb), honest=False)
    async with connected(running.addresses.data) as client:
        await client.post(CHAT, chat(stream=True), "connection: close")
        with peak_growth() as grown:
            assert (await client.rest()).endswith(bomb)
            assert grown() < 32 << 20


async def test_words_about_the_engine_s_own_address_do_not_reach_the_client(fleet: Fleet) -> None:
    words = b'alt-svc: h3="evil:443"\r\nclear-site-data: "*"\r\nstrict-transport-security: max-age=1\r\nx-model: 1\r\n'
    words += b"location: http://10.0.0.7/\r\ncontent-location: http://10.0.0.7/\r\nrefresh: 0; url=http://10.0.0.7/\r\n"
    words += b"x-accel-redirect: /private\r\nset-cookie: a=1\r\nwww-authenticate: Basic\r\nx-sendfile: /etc/passwd\r\n"
    words += b"connection: x-own\r\nx-own: 1\r\nkeep-alive: timeout=5\r\nx-gorgo-replica: other\r\n"
    running, _ = await fleet(says(JSON + words + b"content-length: 2\r\n\r\n{}"), honest=False)
    headers = (await running.client.post(CHAT, content=chat())).headers
    assert not {"alt-svc", "clear-site-data", "strict-transport-security", "x-own", "keep-alive"} & set(headers)
    assert not {"x-accel-redirect", "set-cookie", "www-authenticate", "x-sendfile"} & set(headers)
    assert not {"location", "content-location", "refresh"} & set(headers)
    assert headers["x-model"] == "1"
    assert headers.get_list("x-gorgo-replica") == ["liar"]


#: Streams that break when content has gone out.
BROKEN = {
    "the connection ends": says(SSE + CHUNKED + chunk(GOOD), b"ff\r\ndata: ha", close=True),
    "a chunk size that is none": says(SSE + CHUNKED + chunk(GOOD), b"zz\r\n"),
    "a length that was too long": says(SSE + b"content-length: 99999\r\n\r\n" + GOOD, close=True),
}


@pytest.mark.parametrize("lie", BROKEN)
async def test_stream_that_breaks_after_content_ends_visibly(fleet: Fleet, lie: str) -> None:
    running, _ = await fleet(BROKEN[lie])
    bodies = []
    for _ in range(4):
        async with connected(running.addresses.data) as client:
            await client.post(CHAT, chat(stream=True), "connection: close")
            said = await client.rest()
        if b"x-gorgo-replica: liar" in said:
            bodies.append(said)
    assert bodies
    for said in bodies:
        assert GOOD in said
        if b"content-length" in said.lower():
            # Its client counts and sees that it got less.
            assert len(said.partition(b"\r\n\r\n")[2]) < 99_999
        else:
            event = said.rpartition(b"data: ")[2].partition(b"\n\n")[0]
            assert json.loads(event)["error"]["type"] == "server_error"
            assert b"[DONE]" not in said
    await running.idle()


#: A stream of each dialect, up to its first content, and the name of the last event of one that breaks.
DIALECTS: dict[str, tuple[bytes, dict[str, object], bytes]] = {
    CHAT: (GOOD, {}, b""),
    "/v1/completions": (b'data: {"choices": [{"text": "a"}]}\n\n', {"prompt": "x"}, b""),
    "/generate": (b'data: {"text": "a", "meta_info": {}}\n\n', {"text": "x"}, b""),
    "/v1/responses": (
        b'event: response.output_text.delta\ndata: {"type": "response.output_text.delta", "delta": "a"}\n\n',
        {"input": "x"},
        b"error",
    ),
    "/v1/messages": (
        b'event: content_block_delta\ndata: {"type": "content_block_delta", "delta": {"text": "a"}}\n\n',
        {},
        b"error",
    ),
}


@pytest.mark.parametrize("route", DIALECTS)
async def test_stream_that_breaks_ends_with_an_error_event_that_its_clients_know(fleet: Fleet, route: str) -> None:
    content, fields, name = DIALECTS[route]
    running, _ = await fleet(says(SSE + CHUNKED + chunk(content), b"zz\r\n"), honest=False)
    said = (await running.client.post(route, content=chat(stream=True, **fields))).content
    assert said.startswith(content)
    # Clients of named events pass over one without a name, or of no type: the stream would end as a whole one does.
    lines = said.removeprefix(content).strip().split(b"\n")
    event = json.loads(lines[-1].removeprefix(b"data: "))
    assert lines[:-1] == ([b"event: " + name] if name else [])
    assert event.pop("type", "") == name.decode()
    assert event["error"]["code"] == "upstream_failed"
    assert list(event) == ["error"]
    await running.idle()


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("again", [b"x" * 16_384, b"data: {}\n\n" * 1000, b"\n" * 16_384, b": keep\n" * 2000])
async def test_answer_without_an_end_takes_no_memory(fleet: Fleet, streamed: bool, again: bytes) -> None:
    head = (SSE if streamed else JSON) + b"\r\n" + (GOOD if streamed else b"")
    running, _ = await fleet(forever(head + b"data: ", again), honest=False)
    async with connected(running.addresses.data) as client:
        await client.post(CHAT, chat(stream=True))
        await client.reader.readexactly(1 << 20)
        with peak_growth() as grown:
            for _ in range(512):
                await client.reader.readexactly(1 << 16)
            assert grown() < 12 << 20  # a third of what passed
        client.reset()
    await running.idle()


async def test_stream_without_content_or_end_is_bounded_before_it_is_committed_to(fleet: Fleet) -> None:
    running, _ = await fleet(forever(SSE + b"\r\n", b": ping\n\n"), first_token_timeout_s=0.5)
    async with connected(running.addresses.data) as client:
        await client.post(CHAT, chat(stream=True))
        assert await client.head()
        client.reset()
    await running.idle()


async def test_head_of_an_engine_that_drips_is_given_up(fleet: Fleet) -> None:
    async def speak(writer: asyncio.StreamWriter) -> None:
        writer.write(OK)
        while not writer.is_closing():
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.02)

    running, _ = await fleet(speak, first_token_timeout_s=0.3, response_timeout_s=0.3)
    for streamed in (True, False, True):
        assert (await running.client.post(CHAT, content=chat(stream=streamed))).content == b'{"honest": 1}'
    await running.idle()


async def test_model_list_without_an_end_is_given_up(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gorgo.live.upstream.client.FETCH_LIMIT_BYTES", 100_000)

    async def serve(self: Liar, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        try:
            await forever(JSON + b"\r\n", b" " * 10_000)(writer)
        except ConnectionError:
            writer.close()

    monkeypatch.setattr(Liar, "serve", serve)
    running, _ = await fleet(says(), honest=False)
    response = await running.client.get("/v1/models")
    assert response.status_code == 503


async def test_head_request_has_a_head_and_no_body(start: Start) -> None:
    running = await start.fleet([answer(200)])
    async with connected(running.addresses.data) as client:
        for path, status in (("/health", b"200"), ("/metrics", b"200"), (CHAT, b"405"), ("/nowhere", b"404")):
            client.writer.write(b"HEAD %b HTTP/1.1\r\nhost: g\r\n\r\n" % path.encode())
            head = await client.head()
            assert head.split()[1] == status
            assert int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]) > 0
        client.writer.write(b"GET /health HTTP/1.1\r\nhost: g\r\nconnection: close\r\n\r\n")
        assert (await client.rest()).startswith(b"HTTP/1.1 200")
    assert running.replicas[0].seen == []


async def test_honest_stream_passes_byte_for_byte(start: Start) -> None:
    running = await start.fleet([stream(ROLE, GOOD, b"event: odd\r\ndata: \xf0\x9f", b"\x98\x80\r\n\r\n", DONE)])
    response = await running.client.post(CHAT, content=chat(stream=True))
    assert response.content == ROLE + GOOD + b"event: odd\r\ndata: \xf0\x9f\x98\x80\r\n\r\n" + DONE
