"""Answers of engines, mutated and split anywhere: passed whole, replaced, or ended so that it shows. Nothing hangs."""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from typing import Any

import pytest

from gorgo.config.fleet import ReplicaConfig
from gorgo.config.model import Config, LimitsConfig, RegionConfig
from gorgo.core.messages.request import AttemptResult
from gorgo.core.stream import StreamEnd, end_of_stream
from gorgo.errors import TraceError
from gorgo.lab.traces import load_trace
from gorgo.live.http.body import ResettableTimeout
from gorgo.live.http.headers import Header
from gorgo.live.upstream.client import UpstreamError
from gorgo.proxy.exchange.relay import ResponseWriter, relay
from tests.proxy.conftest import QUIET, Start
from tests.proxy.fakes import DONE, ROLE, USAGE, chat, delta
from tests.proxy.fuzz.mutate import EXAMPLES, mutated
from tests.proxy.integrity.engines import lying, says
from tests.proxy.iterated import IteratedSource
from tests.proxy.passages import passage_to
from tests.proxy.raw import connected

CHAT = "/v1/chat/completions"
STREAM = ROLE + b": ping\n\n" + delta("Hé") + delta("b") + USAGE + DONE
WHOLE = b'{"choices": [], "usage": {"prompt_tokens": 3}}'


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


ANSWERS = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(WHOLE) + WHOLE,
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    + chunked(ROLE, delta("a"), delta("b"), USAGE, DONE),
    b"HTTP/1.1 429 Busy\r\nretry-after: 1\r\ncontent-length: 2\r\n\r\n{}",
)


async def test_answer_with_faults_ends_for_the_client_and_leaves_nothing(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    chance = Random("answers")
    async with AsyncExitStack() as stack:
        liar = await stack.enter_async_context(lying(says()))
        config = Config(
            proxy=QUIET,
            regions=(RegionConfig(name="here"),),
            replicas=(ReplicaConfig(name="liar", region="here", url=liar.url, engine="openai"),),
            limits=LimitsConfig(first_token_timeout_s=0.05, response_timeout_s=0.05, stream_idle_timeout_s=0.05),
        )
        fleet = await start.proxy(config, [])
        for _ in range(EXAMPLES):
            said = mutated(chance, chance.choice(ANSWERS))
            liar.speak = says(said, close=chance.random() < 0.5)
            async with connected(fleet.addresses.data) as client:
                await client.post(CHAT, chat(stream=True), "connection: close")
                got = await client.rest()
            assert 200 <= int(got.split()[1]) <= 504, said
            assert b"internal_error" not in got, said
        await fleet.idle()
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


class Pieces(IteratedSource):
    """An answer in pieces, which may break off."""

    status = 200

    def __init__(self, parts: Sequence[bytes], *, breaks: bool) -> None:
        self.headers: Sequence[Header] = [(b"Content-Type", b"text/event-stream")]
        self._parts = parts
        self._breaks = breaks

    async def each(self) -> AsyncIterator[bytes]:
        for part in self._parts:
            yield part
        if self._breaks:
            raise UpstreamError("disconnected")


async def relayed(
    parts: Sequence[bytes], *, strip: bool = False, breaks: bool = False
) -> tuple[bytes, AttemptResult | str]:
    """What its client was sent, and how it ended."""
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    with ResettableTimeout(1000.0) as dog:
        try:
            passage = passage_to(ResponseWriter(send), dog, strip_usage=strip)
            outcome = await relay(passage, Pieces(parts, breaks=breaks))
        except UpstreamError as failure:
            return b"".join(sent), failure.reason
    return b"".join(sent), outcome.result


async def test_stream_passes_whole_wherever_it_is_split() -> None:
    for at in range(len(STREAM) + 1):
        parts = [STREAM[:at], STREAM[at:]]
        assert await relayed(parts) == (STREAM, AttemptResult.COMPLETED)
        assert await relayed(parts, strip=True) == (STREAM.replace(USAGE, b""), AttemptResult.COMPLETED)
    assert await relayed([STREAM[n : n + 1] for n in range(len(STREAM))]) == (STREAM, AttemptResult.COMPLETED)


async def test_stream_that_breaks_off_anywhere_is_kept_back_or_passed_so_far() -> None:
    first = delta("Hé")
    content = STREAM.index(first) + len(first)
    for at in range(len(STREAM)):
        got, ended = await relayed([STREAM[:at]], breaks=True)
        is_proven = end_of_stream("/v1/chat/completions", STREAM[:at]) is StreamEnd.COMPLETE
        assert ended == (AttemptResult.COMPLETED if at >= content and is_proven else "disconnected"), at
        assert got == (STREAM[:at] if at >= content else b"")


async def test_mutated_stream_passes_as_it_is_or_not_at_all() -> None:
    chance = Random("relay")
    for _ in range(EXAMPLES * 4):
        stream = mutated(chance, STREAM)
        cuts = sorted(chance.randrange(len(stream) + 1) for _ in range(chance.randrange(8)))
        parts = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
        got, ended = await relayed([part for part in parts if part])
        if ended == "truncated":
            assert stream.startswith(got)
        else:
            assert got == (stream if isinstance(ended, AttemptResult) and got else b""), ended


def test_trace_file_with_faults_is_read_or_refused_by_an_error_of_ours(tmp_path: Path) -> None:
    row = {"timestamp": 1, "input_length": 10, "output_length": 1, "hash_ids": [1]}
    good = b"".join(json.dumps(row | {"timestamp": number}).encode() + b"\n" for number in range(5))
    chance, path = Random("traces"), tmp_path / "trace.jsonl"
    refused = 0
    for number in range(EXAMPLES * 2):
        path.write_bytes(mutated(chance, gzip.compress(good, mtime=0) if number % 3 == 0 else good))
        try:
            load_trace(path)
        except TraceError:
            refused += 1
    assert 0 < refused < EXAMPLES * 2
