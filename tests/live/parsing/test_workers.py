"""Large bodies, read by a process of their own: the same result, and none of it is waited for by the event loop."""

from __future__ import annotations

import asyncio
import io
import json
import os
import pickle
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gorgo.core.prompt.fingerprint import MAX_BLOCKS, Fingerprinter
from gorgo.live.http.errors import HttpError
from gorgo.live.parsing import workers as workers_module
from gorgo.live.parsing.fields import MAX_TEXT, BodyFields, read_fields
from gorgo.live.parsing.json_body import MAX_VALUES
from gorgo.live.parsing.worker import JOB, LENGTH, MAX_MEMORY_BYTES, encode, work
from gorgo.live.parsing.workers import NICENESS, BodyWorkers
from gorgo.live.request.judgement import wants_more_than_one
from tests.proxy.conftest import Start
from tests.proxy.fakes import answer

CHAT = "/v1/chat/completions"
FINGERPRINTER = Fingerprinter(key=7)


def chat(text: str, **fields: Any) -> bytes:
    body = {"model": "m", "messages": [{"role": "user", "content": text}], **fields}
    return json.dumps(body, ensure_ascii=False).encode()


@asynccontextmanager
async def workers() -> AsyncIterator[BodyWorkers]:
    found = BodyWorkers(FINGERPRINTER)
    try:
        yield found
    finally:
        await found.aclose()


def pid_of(found: BodyWorkers) -> int:
    process = found._texts._process
    assert process is not None
    return process.pid


@pytest.mark.parametrize(
    "body",
    [
        chat("héllo " * 2_000_000, stream=True, lora_path="a", sampling_params={"max_new_tokens": 1, "stop": ["a"]}),
        chat("a", tools=list(range(300_000))),
    ],
)
async def test_another_process_reads_what_this_one_would(body: bytes) -> None:
    async with workers() as found:
        there = await found.read(CHAT, body)
    here = read_fields(CHAT, body, FINGERPRINTER)
    for name in ("stream", "lora_path", "model", "priority"):
        assert there.values.get(name) == here.values.get(name)
    assert wants_more_than_one(there.values) is wants_more_than_one(here.values)
    assert FINGERPRINTER.hash_sketch(there.sketch, adapter="b") == FINGERPRINTER.hash_sketch(here.sketch, adapter="b")
    assert len(there.sketch.sums) <= MAX_BLOCKS
    assert [body[start:end] for start, end in there.spans or ()] == [b'"m"']


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{" * 100, "not JSON"),
        (b'{"messages":7}', "messages: expected a list"),
        (b"[" + b"0," * MAX_VALUES + b"0]", "values in the body"),
        (json.dumps({"a": 1}).encode("utf-16"), "large body in UTF-8"),
        (chat("a", model="m" * (MAX_TEXT + 1)), "model: expected at most"),
        (chat("a", n=0).replace(b": 0}", b": " + b"9" * 641 + b"}"), "640 digits"),
    ],
)
async def test_what_cannot_be_read_is_the_clients_fault(body: bytes, message: str) -> None:
    async with workers() as found:
        with pytest.raises(HttpError, match=message) as caught:
            await found.read(CHAT, body)
    assert (caught.value.status, caught.value.code) in [(400, "invalid_json"), (400, "invalid_request")]


async def test_process_that_dies_fails_its_job_and_is_replaced() -> None:
    async with workers() as found:
        await found.read(CHAT, chat("a"))
        first = pid_of(found)
        os.kill(first, signal.SIGKILL)
        with pytest.raises(HttpError) as caught:
            await found.read(CHAT, chat("a"))
        assert (caught.value.status, caught.value.code) == (500, "internal_error")
        assert isinstance(await found.read(CHAT, chat("a")), BodyFields)
        assert pid_of(found) != first


async def test_cancelled_job_leaves_no_half_read_result_to_the_next() -> None:
    async with workers() as found:
        job = asyncio.create_task(found.read(CHAT, chat("a" * 20_000_000)))
        while found._texts._process is None:
            await asyncio.sleep(0)
        job.cancel()
        await asyncio.gather(job, return_exceptions=True)
        assert (await found.read(CHAT, chat("b", stream=True))).values["stream"] is True


async def test_lane_takes_a_bounded_number_of_jobs_and_ends_with_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "MAX_WAITING", 2)
    async with workers() as found:
        jobs = [found.read(CHAT, chat("a")) for _ in range(3)]
        results = await asyncio.gather(*jobs, return_exceptions=True)
        assert [getattr(result, "status", 200) for result in results] == [200, 200, 429]
        pid = pid_of(found)
    assert not Path(f"/proc/{pid}").exists()


async def test_job_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "JOB_TIMEOUT_S", 0.0)
    async with workers() as found:
        with pytest.raises(HttpError) as caught:
            await found.read(CHAT, chat("a"))
        assert caught.value.status == 500
        assert found._texts._process is None


async def test_process_has_none_of_the_secrets_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GORGO_ADMIN_TOKEN", "token-of-the-tests")
    async with workers() as found:
        await found.read(CHAT, chat("a"))
        assert b"token-of-the-tests" not in Path(f"/proc/{pid_of(found)}/environ").read_bytes()


async def test_process_gives_way_to_the_event_loop() -> None:
    async with workers() as found:
        await found.read(CHAT, chat("a"))
        own, its = (os.getpriority(os.PRIO_PROCESS, pid) for pid in (0, pid_of(found)))
    assert its == min(19, own + NICENESS)


def test_worker_ends_at_the_end_of_its_input_even_within_a_body() -> None:
    body = chat("a")
    job = JOB.pack(len(CHAT), len(body)) + CHAT.encode() + body
    results = io.BytesIO()
    work(io.BytesIO(encode(FINGERPRINTER) + job + job[:-1]), results)
    data = results.getvalue()
    (size,) = LENGTH.unpack(data[: LENGTH.size])
    assert len(data) == LENGTH.size + size
    fields = pickle.loads(data[LENGTH.size :])
    assert np.array_equal(fields.sketch.sums, read_fields(CHAT, body, FINGERPRINTER).sketch.sums)


async def test_large_body_reaches_the_replica_as_it_came(start: Start) -> None:
    fleet = await start.fleet([answer(200)])
    for body in (chat("x" * 6_000_000), chat("a", tools=list(range(30_000)))):
        response = await fleet.client.post(CHAT, content=body)
        assert response.status_code == 200
        assert fleet.replicas[0].seen[-1].body == body
    refused = await fleet.client.post(CHAT, content=chat("a", tools=[0] * (MAX_VALUES + 1)))
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_json")
    await fleet.idle()


async def test_memory_of_the_process_is_bounded() -> None:
    async with workers() as found:
        await found.read(CHAT, chat("a"))
        limits = Path(f"/proc/{pid_of(found)}/limits").read_text()
    assert re.search(rf"Max data size +{MAX_MEMORY_BYTES} +{MAX_MEMORY_BYTES} ", limits)


def test_a_body_beyond_the_memory_of_the_process_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("gorgo.live.parsing.worker.read_large_body", fail)
    jobs = io.BytesIO(encode(FINGERPRINTER) + JOB.pack(len(CHAT), 2) + CHAT.encode() + b"{}")
    results = io.BytesIO()
    work(jobs, results)
    assert pickle.loads(results.getvalue()[LENGTH.size :])[:2] == (413, "request_too_large")
