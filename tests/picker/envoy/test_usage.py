"""Counts of tokens that Envoy reads of answers as they pass: every dialect, however its bytes come."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
import pytest_asyncio

from tests.picker.envoy.envoy import needs_envoy
from tests.picker.envoy.rig import CHAT, Rig, rig
from tests.proxy.conftest import until
from tests.proxy.fakes import DONE, USAGE, answer, chat, delta, event, stream

pytestmark = [needs_envoy, pytest.mark.asyncio(loop_scope="module")]
GENERATE = json.dumps({"text": "hello", "stream": True, "sampling_params": {"max_new_tokens": 9}}).encode()
#: A text of a client that looks like a usage, as JSON has it within an answer.
FALSE_USAGE = delta('"usage": {"prompt_tokens": 999, "completion_tokens": 999} }')
LONG = delta("x" * 70_000)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    async with rig(tmp_path_factory.mktemp("usage")) as found:
        yield found


def meta(count: int) -> bytes:
    found = {"id": "r", "finish_reason": {"matched": "}"}, "prompt_tokens": 12, "cached_tokens": 8}
    return event({"text": "a", "meta_info": {**found, "completion_tokens": count}})


def anthropic(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\n" + event({"type": kind, **fields})


def json_answer(usage: object, *, text: str = "a") -> bytes:
    return json.dumps({"choices": [{"message": {"content": text}}], "usage": usage, "prompt_logprobs": None}).encode()


FOUND = {"prompt_tokens": 12, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 8}}
START = anthropic("message_start", message={"usage": {"input_tokens": 4, "cache_read_input_tokens": 8}})
DELTA = anthropic("content_block_delta", delta={"type": "text_delta", "text": "a"})
STREAMS = {
    "with an event of its own": [delta("a"), USAGE, DONE],
    "byte by byte": [delta("a"), *(USAGE[at : at + 1] for at in range(len(USAGE))), DONE],
    "in one piece with a long text": [LONG + USAGE + DONE],
    "after a long text": [*([LONG] * 20), USAGE, DONE],
    "behind one that looks like it": [FALSE_USAGE, USAGE, DONE],
    "before one that looks like it": [USAGE, FALSE_USAGE, DONE],
    "before a usage that is cut off": [USAGE, b'data: {"usage": null}\n\n', DONE],
    "beside bytes that are no text": [USAGE, b": \xff\xfe\x00\n\n", DONE],
}


async def answered(running: Rig, script: object, body: bytes, path: str = CHAT) -> tuple[Any, bytes]:
    """Return the sample of a request, and what the client has got."""
    running.script(script)
    before = len(running.samples)
    async with running.client() as client:
        response = await client.post(path, content=body)
    assert response.status_code == 200
    await until(partial(has_samples, running, before + 1))
    await running.idle()
    return running.samples[-1], response.content


def has_samples(running: Rig, count: int) -> bool:
    return len(running.samples) >= count


def counts(sample: Any) -> tuple[Any, ...]:
    return sample["input_tokens"], sample["cached_tokens"], sample["output_tokens"]


@pytest.mark.parametrize("parts", STREAMS.values(), ids=STREAMS)
async def test_usage_of_a_stream(running: Rig, parts: list[bytes]) -> None:
    sample, content = await answered(running, stream(*parts), chat(stream=True))
    assert counts(sample) == (12, 8, 2)
    assert content == b"".join(parts)


async def test_usage_in_the_words_of_sglang(running: Rig) -> None:
    sample, _ = await answered(running, stream(meta(1), meta(2), DONE), GENERATE, "/generate")
    assert counts(sample) == (12, 8, 2)


@pytest.mark.parametrize("middle", [DELTA, DELTA * 200], ids=["short", "long"])
async def test_usage_in_the_words_of_anthropic_at_both_ends(running: Rig, middle: bytes) -> None:
    end = anthropic("message_delta", usage={"output_tokens": 2})
    parts = [START, middle, end, anthropic("message_stop")]
    body = {"model": "m", "max_tokens": 9, "stream": True, "messages": [{"role": "user", "content": "hello"}]}
    sample, content = await answered(running, stream(*parts), json.dumps(body).encode(), "/v1/messages")
    assert counts(sample) == (12, 8, 2)
    assert content == b"".join(parts)


@pytest.mark.parametrize("text", ["a", "x" * 300_000, '"usage": {"prompt_tokens": 999}'])
async def test_usage_of_an_answer_in_one_piece(running: Rig, text: str) -> None:
    whole = json_answer(FOUND, text=text)
    sample, content = await answered(running, answer(200, whole), chat())
    assert counts(sample) == (12, 8, 2)
    assert content == whole


async def test_usage_of_a_batch_is_the_sum_of_its_answers(running: Rig) -> None:
    one = {"text": "a", "meta_info": {"prompt_tokens": 6, "cached_tokens": 4, "completion_tokens": 1}}
    body = json.dumps({"text": ["hello", "hello"], "sampling_params": {"max_new_tokens": 9}}).encode()
    sample, _ = await answered(running, answer(200, json.dumps([one, one]).encode()), body, "/generate")
    assert counts(sample) == (12, 8, 2)


@pytest.mark.parametrize(
    "last",
    [
        b'data: {"choices": [], "usage": {"prompt_tokens": "twelve", "completion_tokens": -1}}\n\n',
        b'data: {"choices": [], "usage": {{{{{{\n\n',
        b'data: {"choices": [], "usage": [{"prompt_tokens": 12}]}\n\n',
        b'data: {"choices": [], "usage": {"completion_tokens": 99999999999999999999999999}}\n\n',
        b'data: {"choices": [], "usage": {"\xff": "\x00',
        b'"usage":' * 4000,
        b"{" * 9000,
        b"%s%d\x00\\" * 2000,
    ],
)
async def test_a_malformed_usage_is_none_and_breaks_nothing(running: Rig, last: bytes) -> None:
    sample, content = await answered(running, stream(delta("a"), delta("b"), last), chat(stream=True))
    assert sample["output_tokens"] is None
    assert content == delta("a") + delta("b") + last


async def test_a_long_answer_without_a_usage_is_searched_once(running: Rig) -> None:
    """A search from each place would hold all of Envoy's streams for a second."""
    text = b"x" * 30_000
    took_s = []
    for _ in range(3):
        started_s = time.monotonic()
        sample, content = await answered(running, stream(delta("a"), *[text] * 4), chat(stream=True))
        took_s.append(time.monotonic() - started_s)
        assert sample["output_tokens"] is None
        assert content == delta("a") + text * 4
    # The fastest has least of other programs' work in it: 0.1 s, and 1 s where each place is searched from.
    assert min(took_s) < 0.5


async def test_an_encoded_answer_is_not_searched(running: Rig) -> None:
    plain = json_answer(FOUND, text="x" * 300_000)
    whole = gzip.compress(plain, compresslevel=0)
    script = answer(200, whole, {"content-type": "application/json", "content-encoding": "gzip"})
    sample, content = await answered(running, script, chat())
    assert sample["output_tokens"] is None
    assert content == plain
