"""Bytes of the replica through the proxy, in one step of the loop, in both directions, with their gaps measured."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import logging
import random
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from gorgo.core.limits import BufferBudget
from gorgo.core.messages.request import AttemptResult, Outcome
from gorgo.live.http.body import ResettableTimeout
from gorgo.live.http.errors import HttpError, Message
from gorgo.live.http.headers import Header
from gorgo.live.request import parse
from gorgo.live.request import parse as gaps
from gorgo.live.request.record import RequestRecord
from gorgo.live.upstream.client import UpstreamError
from gorgo.policies.registry import make_policy
from gorgo.proxy.exchange import passage as passage_module
from gorgo.proxy.exchange import relay as event_stream
from gorgo.proxy.exchange import response as response_module
from gorgo.proxy.exchange.relay import relay
from gorgo.proxy.exchange.response import ClientResponse, ResponseWriter, direct_write, no_direct_write
from tests.proxy.conftest import Start, config_for, system_tls, until, with_replica
from tests.proxy.fakes import DONE, ROLE, USAGE, answer, chat, delta, event, hang, running, stream
from tests.proxy.passages import IteratedSource, passage_to
from tests.proxy.raw import connected

# --- The p95 of an answer's token gaps, by a clock that the engine moves.


CHAT = "/v1/chat/completions"
FINISH = event({"choices": [{"delta": {}, "finish_reason": "stop"}]})


class PacedSource(IteratedSource):
    """An event stream whose chunks come after so many seconds each."""

    status = 200

    def __init__(self, chunks: Sequence[tuple[float, bytes]], *, kind: bytes = b"text/event-stream") -> None:
        self.headers: Sequence[Header] = [(b"Content-Type", kind)]
        self.now_s = 100.0
        self._chunks = chunks

    async def each(self) -> AsyncIterator[bytes]:
        for after_s, chunk in self._chunks:
            self.now_s += after_s
            yield chunk


async def p95_of(source: PacedSource, monkeypatch: pytest.MonkeyPatch, route: str = CHAT) -> float | None:
    async def send(_message: Any) -> None:
        return

    monkeypatch.setattr("gorgo.proxy.exchange.passage.monotonic", lambda: source.now_s)
    with ResettableTimeout(1000.0) as dog:
        return (await relay(passage_to(ResponseWriter(send), dog, route=route), source)).itl_s_p95


def tokens(gaps_s: Sequence[float]) -> list[tuple[float, bytes]]:
    """A first token after nine seconds of prefill, and one more after each gap."""
    return [(0.0, ROLE), (9.0, delta("a")), *((gap_s, delta("b")) for gap_s in gaps_s)]


@pytest.mark.parametrize(("gaps", "place"), [(1, 1), (2, 2), (19, 19), (20, 19), (21, 20), (40, 38), (100, 95)])
async def test_p95_is_the_least_gap_that_19_in_20_do_not_exceed(
    gaps: int, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gaps of 1, 2, ... seconds, the longest first: the one at `place` is that of `place` seconds."""
    source = PacedSource([*tokens([float(number) for number in range(gaps, 0, -1)]), (0.0, DONE)])
    assert await p95_of(source, monkeypatch) == pytest.approx(place)


async def test_one_token_has_no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await p95_of(PacedSource([*tokens([]), (5.0, DONE)]), monkeypatch) is None


async def test_a_comment_is_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    source = PacedSource([*tokens([1.0]), (2.0, b": ping\n\n"), (3.0, delta("c")), (0.0, DONE)])
    assert await p95_of(source, monkeypatch) == pytest.approx(5.0)


@pytest.mark.parametrize(
    "end",
    [[DONE], [USAGE, DONE], [FINISH, USAGE, DONE], [FINISH, USAGE + DONE], [DONE[:4], DONE[4:]]],
    ids=["done", "usage", "finish", "joined", "split"],
)
async def test_usage_and_end_of_a_stream_are_no_tokens(end: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    source = PacedSource([*tokens([1.0]), *((5.0, chunk) for chunk in end)])
    assert await p95_of(source, monkeypatch) == pytest.approx(1.0)


async def test_end_of_a_message_is_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [event({"type": "content_block_delta", "delta": {"type": "text_delta", "text": "a"}})] * 2
    stop = event({"type": "content_block_stop", "index": 0})
    usage = event({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}})
    end = [stop, usage, event({"type": "message_stop"})]
    source = PacedSource([*((1.0, text) for text in texts), *((5.0, chunk) for chunk in end)])
    assert await p95_of(source, monkeypatch, "/v1/messages") == pytest.approx(1.0)


async def test_token_that_comes_with_the_end_has_its_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    source = PacedSource([*tokens([1.0]), (5.0, delta("c") + USAGE + DONE)])
    assert await p95_of(source, monkeypatch) == pytest.approx(5.0)


async def test_answer_with_more_gaps_than_are_recorded_loses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gorgo.live.request.parse.MAX_GAPS", 2)
    source = PacedSource([*tokens([1.0, 3.0]), (5.0, DONE)])
    assert await p95_of(source, monkeypatch) == pytest.approx(3.0)


async def test_pieces_of_a_whole_body_are_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    source = PacedSource([(1.0, b" " * 40_000)] * 4, kind=b"application/json")
    assert await p95_of(source, monkeypatch) is None


async def test_the_first_byte_of_an_encoded_stream_is_not_buffered() -> None:
    source = PacedSource([(1.0, b"z"), (5.0, b"rest")])
    source.headers = [*source.headers, (b"Content-Encoding", b"gzip")]
    bodies: list[tuple[float, bytes]] = []

    async def send(message: Any) -> None:
        if message.get("body"):
            bodies.append((source.now_s, message["body"]))

    with ResettableTimeout(1000.0) as dog:
        await relay(passage_to(ResponseWriter(send), dog), source)
    assert bodies == [(101.0, b"z"), (106.0, b"rest")]


def test_a_relay_holds_64_kibibytes_4096_gaps_and_the_last_four_events() -> None:
    assert (event_stream.BUFFER_BYTES, gaps.MAX_GAPS, gaps.END_EVENTS) == (65_536, 4096, 4)
    assert frozenset({"/v1/responses", "/v1/messages"}) == passage_module._NAMED_EVENTS


def test_an_id_counts_as_four_bytes_and_an_error_event_has_five_seconds() -> None:
    assert (parse._BYTES_PER_ID, response_module._ERROR_EVENT_TIMEOUT_S) == (4.0, 5.0)
    assert frozenset({"/v1/chat/completions", "/v1/completions"}) == parse._USAGE_ROUTES


# --- The hot loop: chunks go from the source to the client in one step, and the task of the request sleeps.


class PushedSource:
    """An answer whose reads are pushed by the test, as a connection pushes them."""

    status = 200

    def __init__(self) -> None:
        self.headers: Sequence[Header] = [(b"Content-Type", b"text/event-stream")]
        self.waiting: list[bytes] = []
        self._sink: Callable[[bytes], bool] | None = None
        self._done: asyncio.Future[bool] | None = None
        self._ended = False

    def is_paused(self) -> bool:
        return self._sink is None

    def push(self, *chunks: bytes, end: bool = False) -> None:
        """Receive chunks in the current step."""
        self.waiting += chunks
        self._ended = end
        self._flush()

    async def pipe(self, sink: Callable[[bytes], bool]) -> bool:
        self._sink, self._done = sink, asyncio.get_running_loop().create_future()
        self._flush()
        return await self._done

    def take_whole(self, limit: int) -> bytes | None:
        return None

    def chunks(self) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        raise AssertionError("every part of an answer is piped")

    async def aclose(self) -> None:
        """Close nothing."""

    def _flush(self) -> None:
        while self._sink is not None and self.waiting:
            if not self._sink(self.waiting.pop(0)):
                self._end(False)
        if self._sink is not None and self._ended:
            self._end(True)

    def _end(self, ended: bool) -> None:
        assert self._done is not None
        self._sink = None
        self._done.set_result(ended)


class Client:
    """A client's connection: `room` chunks are written at once, the others when `read` is set."""

    def __init__(self, room: int = 1000) -> None:
        self.got: list[bytes] = []
        self.room = room
        self.read = asyncio.Event()
        self.closed = False

    async def send(self, message: Any) -> None:
        if message.get("body"):
            await self.read.wait()
            self.got.append(message["body"])

    def try_write(self, chunk: bytes) -> bool:
        if not self.room:
            return False
        self.room -= 1
        self.got.append(chunk)
        return True


class Writer(ResponseWriter):
    """Writes to a `Client`."""

    __slots__ = ("_client",)

    def __init__(self, client: Client) -> None:
        super().__init__(client.send)
        self._client = client

    async def start(self, status: int, headers: Any, **options: Any) -> None:
        await super().start(status, headers, **options)
        self.try_write = self._client.try_write


def begin(
    source: PushedSource, client: Client, *, strip: bool = False, on_content: Callable[[], None] = lambda: None
) -> asyncio.Task[Outcome]:
    """Relay `source` to `client` in a task."""

    async def run() -> Outcome:
        with ResettableTimeout(60.0) as timeout:
            passage = passage_to(Writer(client), timeout, chunk_limit_s=60.0, strip_usage=strip, on_content=on_content)
            return await relay(passage, source)

    return asyncio.create_task(run())


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("strip", [False, True])
async def test_an_event_is_written_in_the_step_in_which_it_was_received(strip: bool) -> None:
    source, client = PushedSource(), Client()
    client.read.set()
    relaying = begin(source, client, strip=strip)
    await turns()
    source.push(ROLE, delta("a"))
    await turns()
    assert client.got == [ROLE + delta("a")]
    for number in range(100):
        source.push(delta(str(number)))
        assert client.got[-1] == delta(str(number))
        assert not source.is_paused(), "the task of the request was not woken"
    source.push(USAGE, DONE, end=True)
    await turns()
    outcome = await relaying
    assert (outcome.result, outcome.output_tokens) == (AttemptResult.COMPLETED, 2)
    assert b"".join(client.got).endswith(DONE)
    assert (USAGE in client.got) is not strip


async def test_the_first_token_is_written_before_it_is_recorded() -> None:
    source, client = PushedSource(), Client()
    written: list[list[bytes]] = []
    relaying = begin(source, client, on_content=lambda: written.append([*client.got]))
    await turns()
    source.push(ROLE, delta("a"))
    await turns()
    assert written == [[ROLE + delta("a")]]
    source.push(DONE, end=True)
    await relaying


async def test_a_first_token_is_recorded_before_a_wait_for_its_client() -> None:
    source, client = PushedSource(), Client(room=0)
    written: list[list[bytes]] = []
    relaying = begin(source, client, on_content=lambda: written.append([*client.got]))
    await turns()
    source.push(delta("a"))
    await turns()
    assert (written, client.got) == ([[]], [])
    client.room = 1000
    client.read.set()
    source.push(DONE, end=True)
    await relaying
    assert (len(written), client.got) == (1, [delta("a"), DONE])


async def test_a_client_that_is_behind_pauses_the_replica_and_loses_no_byte() -> None:
    source, client = PushedSource(), Client(room=3)
    relaying = begin(source, client)
    await turns()
    events = [delta(str(number)) for number in range(6)]
    source.push(ROLE, *events)
    await turns()
    assert client.got == [ROLE + events[0], *events[1:3]]
    assert source.is_paused(), "reading waits for the client"
    client.room = 1000
    client.read.set()
    await turns()
    assert client.got == [ROLE + events[0], *events[1:]]
    assert not source.is_paused()
    source.push(DONE, end=True)
    assert (await relaying).result is AttemptResult.COMPLETED


async def test_a_client_that_stopped_reading_is_waited_for_as_its_own_stall() -> None:
    source, client = PushedSource(), Client(room=1)
    writer = Writer(client)
    budget = BufferBudget(1 << 40)

    async def run() -> None:
        with ResettableTimeout(60.0) as timeout:
            await relay(passage_to(writer, timeout, chunk_limit_s=0.05, budget=budget), source)

    relaying = asyncio.create_task(run())
    await turns()
    source.push(delta("a"))
    await turns()
    source.push(delta("b"))
    await turns()
    assert (writer.sending, budget.used_bytes > 0) == (True, True)
    with pytest.raises(TimeoutError):
        await relaying
    assert budget.used_bytes == 0, "the buffers of both connections are released"


async def test_a_stream_without_an_end_fails_after_its_last_byte_was_passed() -> None:
    source, client = PushedSource(), Client()
    client.read.set()
    relaying = begin(source, client)
    await turns()
    source.push(delta("a"))
    await turns()
    source.push(delta("b"), end=True)
    with pytest.raises(UpstreamError, match="truncated"):
        await relaying
    assert client.got == [delta("a"), delta("b")]


# --- The proxy's own answers to one request.


async def test_a_response_that_is_an_error_is_finished_and_nothing_follows_it() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    rejected: list[str] = []
    state: Any = SimpleNamespace(
        telemetry=SimpleNamespace(metrics=SimpleNamespace(rejected=rejected.append)),
        routing=SimpleNamespace(router=SimpleNamespace(settings=SimpleNamespace(policy=make_policy("nearest")))),
    )
    record = RequestRecord(state.routing, state.telemetry, 0.0)
    response = ClientResponse(state, send, "r", record)
    await response.send_error(HttpError(503, "no_replica", "no replica is eligible"))
    assert response.writer.finished is True
    await response.abort()
    assert [message["status"] for message in sent if "status" in message] == [503]
    assert (rejected, record.status, record.code) == (["no_replica"], 503, "no_replica")
    assert {(b"x-request-id", b"r"), (b"x-gorgo-policy", b"nearest")} <= set(sent[0]["headers"])


# --- Bytes through the proxy are the bytes of the replica, streamed or not, in both directions.


TOOL_BODY = chat(
    stream=True,
    tools=[{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}],
    messages=[
        {"role": "user", "content": [{"type": "text", "text": "what is it?"}, {"type": "image_url", "image_url": {}}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": {}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "a cat 🐈"},
    ],
    unknown_field={"kept": [1.0, 1e400, None]},
)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


async def test_stream_passes_byte_for_byte_and_names_its_replica(start: Start) -> None:
    chunks = (b": hello\n\n", ROLE, delta("a"), delta("b"), DONE)
    fleet = await start.fleet([stream(*chunks)])
    body = chat(stream=True)
    response = await fleet.client.post("/v1/chat/completions", content=body)
    assert (response.status_code, response.content) == (200, b"".join(chunks))
    assert response.headers["x-gorgo-replica"] == "r0"
    assert response.headers["x-gorgo-region"] == "here"
    assert response.headers["x-gorgo-policy"] == "round-robin"
    assert response.headers["x-gorgo-weights-version"] == "1"
    assert response.headers["x-gorgo-estimated-cached-tokens"] == "0"
    assert fleet.replicas[0].seen[0].body == body
    await fleet.idle()


@pytest.mark.parametrize("seed", range(3))
async def test_stream_cut_anywhere_arrives_as_it_was(start: Start, seed: int) -> None:
    rng = random.Random(seed)
    whole = ROLE + b"".join(delta(chr(0x4E00 + n) * 3) for n in range(200)) + USAGE + DONE
    cuts = sorted(rng.sample(range(1, len(whole)), 60))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    fleet = await start.fleet([stream(*pieces)])
    response = await fleet.client.post("/v1/chat/completions", content=chat(stream=True))
    assert digest(response.content) == digest(whole)
    sample = next(iter(fleet.state.routing.router.samples))
    assert (sample.input_tokens, sample.cached_tokens, sample.output_tokens) == (12, 8, 2)


@pytest.mark.parametrize("size", [0, 100, 64 * 1024, 64 * 1024 + 1, 5_000_000])
async def test_whole_answer_of_any_size_arrives_with_its_length(start: Start, size: int) -> None:
    body = b'{"object":"list","data":"' + b"x" * size + b'","usage":{"prompt_tokens":3,"total_tokens":3}}'
    fleet = await start.fleet([answer(200, body)])
    response = await fleet.client.post("/v1/embeddings", json={"input": "hello"})
    assert digest(response.content) == digest(body)
    assert response.headers["content-length"] == str(len(body))
    await fleet.idle()
    assert next(iter(fleet.state.routing.router.samples)).input_tokens == 3


async def test_body_with_tools_and_images_reaches_the_replica_byte_for_byte(start: Start) -> None:
    fleet = await start.fleet([stream(delta("a"), DONE)])
    response = await fleet.client.post("/v1/chat/completions", content=TOOL_BODY)
    assert response.status_code == 200
    assert digest(fleet.replicas[0].seen[0].body) == digest(TOOL_BODY)


async def test_megabytes_of_body_reach_the_replica_byte_for_byte(start: Start) -> None:
    fleet = await start.fleet([answer(200)])
    body = chat(messages=[{"role": "user", "content": "π" * 3_000_000}])
    response = await fleet.client.post("/v1/chat/completions", content=body)
    assert response.status_code == 200
    assert digest(fleet.replicas[0].seen[0].body) == digest(body)


async def test_encoded_answer_that_was_not_asked_for_stays_encoded(start: Start) -> None:
    packed = gzip.compress(b'{"choices":[]}')
    fleet = await start.fleet([answer(200, packed, {"content-encoding": "gzip"})])
    async with fleet.client.stream("POST", "/v1/chat/completions", content=chat()) as response:
        raw = b"".join([chunk async for chunk in response.aiter_raw()])
    assert raw == packed
    assert response.headers["content-encoding"] == "gzip"
    assert fleet.replicas[0].seen[0].header("accept-encoding") == ["identity"]


async def test_replica_gets_no_header_that_nobody_sent_but_the_id_and_the_coding_of_its_answer(start: Start) -> None:
    fleet = await start.fleet([answer(200)])
    async with httpx.AsyncClient(base_url=fleet.addresses.data_url, verify=system_tls()) as bare:
        request = bare.build_request("POST", "/v1/chat/completions", content=chat())
        for name in ("accept-encoding", "accept", "user-agent"):
            del request.headers[name]
        assert (await bare.send(request)).status_code == 200
    seen = fleet.replicas[0].seen[0]
    assert {key.lower() for key, _ in seen.headers} == {b"host", b"content-length", b"x-request-id", b"accept-encoding"}


async def test_encoded_stream_is_passed_at_once(start: Start) -> None:
    packed, late = gzip.compress(delta("a")), gzip.compress(DONE)
    fleet = await start.fleet([hang(packed, rest=[late], headers={"content-encoding": "gzip"})])
    async with fleet.client.stream("POST", "/v1/chat/completions", content=chat(stream=True)) as response:
        raw = response.aiter_raw()
        first = await anext(raw)
        fleet.replicas[0].release.set()
        rest = b"".join([chunk async for chunk in raw])
    assert first + rest == packed + late


async def test_an_image_is_priced_by_its_size_and_then_as_its_model_reports(start: Start) -> None:
    usage = event({"choices": [], "usage": {"prompt_tokens": 3000, "completion_tokens": 1}})
    fleet = await start.fleet([stream(delta("a"), usage, DONE)])
    head = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + (1120).to_bytes(4, "big") * 2
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{b64encode(head).decode()}"}}
    for tokens in (1601, 3000):  # 40 x 40 patches of 28 pixels and a word, and as reported
        body = chat(messages=[{"role": "user", "content": [image, {"type": "text", "text": "what"}]}], stream=True)
        response = await fleet.client.post("/v1/chat/completions", content=body)
        (decision,) = fleet.state.routing.router.view.decisions(response.headers["x-request-id"])
        assert decision.prompt_tokens == tokens
    await fleet.idle()


async def test_nothing_is_sent_before_the_first_content(start: Start) -> None:
    preamble = (b": wait\n\n", ROLE)
    fleet = await start.fleet([hang(*preamble, rest=[delta("a"), DONE])])
    request = asyncio.create_task(fleet.client.post("/v1/chat/completions", content=chat(stream=True)))
    await fleet.replicas[0].arrived.wait()
    await until(lambda: len(fleet.replicas[0].seen) == 1)
    assert not request.done()
    assert fleet.state.routing.router.view.snapshots(now=fleet.state.routing.clock())[0].queued_prefill_tokens > 0
    fleet.replicas[0].release.set()
    response = await request
    assert response.content == b"".join(preamble) + delta("a") + DONE
    await fleet.idle()


async def test_more_than_64_kib_without_content_is_let_go(start: Start) -> None:
    comments = b": " + b"x" * 80_000 + b"\n\n"
    fleet = await start.fleet([hang(comments, rest=[delta("a"), DONE])])
    async with fleet.client.stream("POST", "/v1/chat/completions", content=chat(stream=True)) as response:
        raw = response.aiter_raw()
        got = await anext(raw)
        fleet.replicas[0].release.set()
        got += b"".join([chunk async for chunk in raw])
    assert digest(got) == digest(comments + delta("a") + DONE)
    await fleet.idle()
    assert next(iter(fleet.state.routing.router.samples)).ttft_ms is not None


async def test_more_than_64_kib_of_comments_is_let_go_and_the_first_content_still_found(start: Start) -> None:
    comments = (b": " + b"x" * 1000 + b"\n\n") * 70
    fleet = await start.fleet([hang(comments, rest=[ROLE, delta("a"), delta("b"), DONE])])
    async with fleet.client.stream("POST", "/v1/chat/completions", content=chat(stream=True)) as response:
        raw = response.aiter_raw()
        got = await anext(raw)
        assert fleet.state.routing.router.view.snapshots(now=fleet.state.routing.clock())[0].queued_prefill_tokens > 0
        fleet.replicas[0].release.set()
        got += b"".join([chunk async for chunk in raw])
    assert digest(got) == digest(comments + ROLE + delta("a") + delta("b") + DONE)
    await fleet.idle()
    assert next(iter(fleet.state.routing.router.samples)).ttft_ms is not None


async def test_stream_that_ends_without_content_is_complete(start: Start) -> None:
    fleet = await start.fleet([stream(ROLE, DONE)], [stream(delta("b"), DONE)])
    response = await fleet.client.post("/v1/chat/completions", content=chat(stream=True))
    assert response.content == ROLE + DONE


async def test_usage_is_asked_for_and_taken_out_again_where_the_replica_says_so(start: Start) -> None:
    async with running(stream(ROLE, delta("a"), USAGE, DONE)) as replica:
        config = with_replica(config_for([replica]), 0, request_usage=True)
        fleet = await start.proxy(config, [replica])
        response = await fleet.client.post("/v1/chat/completions", content=chat(stream=True))
        assert response.content == ROLE + delta("a") + DONE
        seen = json.loads(replica.seen[0].body)
        assert seen == {**json.loads(chat(stream=True)), "stream_options": {"include_usage": True}}
        assert next(iter(fleet.state.routing.router.samples)).cached_tokens == 8


@pytest.mark.parametrize("fields", [{"stream": True, "stream_options": {"include_usage": True}}, {"stream": False}])
async def test_usage_that_the_client_asked_for_itself_stays(start: Start, fields: dict[str, object]) -> None:
    async with running(stream(ROLE, delta("a"), USAGE, DONE)) as replica:
        config = with_replica(config_for([replica]), 0, request_usage=True)
        fleet = await start.proxy(config, [replica])
        body = chat(**fields)
        response = await fleet.client.post("/v1/chat/completions", content=body)
        assert response.content == ROLE + delta("a") + USAGE + DONE
        assert replica.seen[0].body == body


async def test_usage_is_never_asked_for_by_default(start: Start) -> None:
    fleet = await start.fleet([stream(delta("a"), DONE)])
    await fleet.client.post("/v1/chat/completions", content=chat(stream=True))
    assert fleet.replicas[0].seen[0].body == chat(stream=True)


async def test_stored_response_goes_back_to_its_replica(start: Start) -> None:
    first = event({"type": "response.created", "response": {"id": "resp_abc"}})
    text = event({"type": "response.output_text.delta", "delta": "a"})
    fleet = await start.fleet([stream(first, text)], [answer(200, b'{"id":"resp_other"}')])
    opened = await fleet.client.post("/v1/responses", json={"model": "m", "input": "hello", "stream": True})
    assert opened.headers["x-gorgo-replica"] == "r0"
    for _ in range(3):
        again = {"model": "m", "input": "and?", "previous_response_id": "resp_abc", "stream": True}
        assert (await fleet.client.post("/v1/responses", json=again)).headers["x-gorgo-replica"] == "r0"


async def test_unknown_stored_response_is_a_clear_404(start: Start) -> None:
    fleet = await start.fleet([answer(200)])
    body = {"model": "m", "input": "and?", "previous_response_id": "resp_nobody"}
    response = await fleet.client.post("/v1/responses", json=body)
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "previous_response_not_found"
    assert "previous_response_id" in response.json()["error"]["message"]


async def test_learned_bytes_per_token_move_the_estimate(start: Start) -> None:
    usage = {"prompt_tokens": 20_000, "completion_tokens": 1}
    fleet = await start.fleet([answer(200, json.dumps({"usage": usage}).encode())])
    body = chat(messages=[{"role": "user", "content": "x" * 40_000}])
    answers = [await fleet.client.post("/v1/chat/completions", content=body) for _ in range(2)]
    decisions = [fleet.state.routing.router.view.decisions(answer.headers["x-request-id"]) for answer in answers]
    first, second = (decision.prompt_tokens for (decision,) in decisions)
    assert first == 10_000
    assert second > 18_000


# --- What is known of an answer while it goes out, and one of the app's own that is dropped because it is late.


# --- What is known of an answer while it goes out.


EVENTS = (b"content-type", b"text/event-stream")


class WrittenClient:
    """Takes messages, and notes whether the writer says that it waits for it."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.waiting: list[bool] = []
        self.writer = ResponseWriter(self.send, lambda _chunk: True)

    async def send(self, message: Message) -> None:
        self.sent.append(message)
        self.waiting.append(self.writer.sending)


@pytest.mark.parametrize(
    ("status", "headers", "events", "direct"),
    [
        (200, [EVENTS], True, True),
        (201, [EVENTS], True, False),
        (500, [EVENTS], True, False),
        (200, [EVENTS, (b"content-length", b"5")], False, False),
        (200, [EVENTS, (b"content-encoding", b"gzip")], False, False),
        (200, [(b"content-type", b"application/json")], False, False),
        (200, [], False, False),
    ],
)
async def test_only_a_plain_stream_of_events_can_carry_errors_and_only_a_good_one_is_written_directly(
    status: int, headers: list[Header], events: bool, direct: bool
) -> None:
    client = WrittenClient()
    await client.writer.start(status, headers)
    assert (client.writer.status, client.writer.started, client.writer.finished) == (status, True, False)
    assert (client.writer.carries_events, client.writer.try_write(b"x")) == (events, direct)
    await client.writer.finish()
    assert not client.writer.try_write(b"x"), "after the last chunk nothing follows"


async def test_a_writer_says_when_it_waits_for_the_client_and_what_it_has_sent() -> None:
    client = WrittenClient()
    assert (client.writer.started, client.writer.finished, client.writer.sending) == (False, False, False)
    assert (client.writer.status, client.writer.names_events, client.writer.carries_events) == (0, False, False)
    await client.writer.start(200, [EVENTS], names_events=True)
    assert (client.writer.sending, client.writer.names_events) == (False, True)
    await client.writer.write(b"a")
    await client.writer.finish(b"b")
    assert (client.writer.sending, client.writer.finished) == (False, True)
    assert client.waiting == [True, False, True]
    assert client.sent == [
        {"type": "http.response.start", "status": 200, "headers": [EVENTS]},
        {"type": "http.response.body", "body": b"a", "more_body": True},
        {"type": "http.response.body", "body": b"b", "more_body": False},
    ]


def test_server_without_the_extension_gets_every_chunk_by_send() -> None:
    assert direct_write({"extensions": {}}) is no_direct_write
    assert not no_direct_write(b"a")


# --- A response of the app's own to a request that the connection has refused meanwhile: dropped, and no fault.


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: g\r\ntransfer-encoding: chunked\r\n\r\n"


async def test_a_timeout_of_a_body_in_the_moment_of_a_bad_chunk_is_no_fault(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = await start.fleet([answer(200)], body_timeout_s=0.1)
    async with connected(fleet.addresses.data) as client:
        client.writer.write(HEAD)
        await until(lambda: fleet.state.exchanges)
        client.writer.write(b"1 \r\na\r\n")
        time.sleep(0.12)  # so that the timeout and the chunk are both due when the loop goes on
        said = await client.rest()
    assert said.startswith(b"HTTP/1.1 4")
    assert said.count(b"HTTP/1.1 4") == 1
    await fleet.idle()
    await asyncio.sleep(0)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
