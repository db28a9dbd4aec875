"""The p95 of an answer's token gaps, by a clock that the engine moves."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from gorgo.live.http.body import ResettableTimeout
from gorgo.live.http.headers import Header
from gorgo.live.request import parse
from gorgo.live.request import parse as gaps
from gorgo.proxy.exchange import exchange
from gorgo.proxy.exchange import relay as event_stream
from gorgo.proxy.exchange import relay as passage_module
from gorgo.proxy.exchange.relay import ResponseWriter, relay
from tests.proxy.fakes import DONE, ROLE, USAGE, delta, event
from tests.proxy.iterated import IteratedSource
from tests.proxy.passages import passage_to

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

    monkeypatch.setattr("gorgo.proxy.exchange.relay.monotonic", lambda: source.now_s)
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
    assert (parse._BYTES_PER_ID, exchange._ERROR_EVENT_TIMEOUT_S) == (4.0, 5.0)
    assert frozenset({"/v1/chat/completions", "/v1/completions"}) == parse._USAGE_ROUTES
