"""Large bodies, read by a process of their own: the same result, and none of it is waited for by the event loop."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gorgo.core.prompt.fingerprint import MAX_BLOCKS, Fingerprinter
from gorgo.live.http.errors import HttpError
from gorgo.live.parsing import workers as workers_module
from gorgo.live.parsing.json_body import MAX_TEXT, MAX_VALUES, BodyFields, read_fields
from gorgo.live.parsing.worker import MAX_MEMORY_BYTES, reader
from gorgo.live.parsing.workers import JOB_TIMEOUT_S, BodyWorkers, Turns
from gorgo.live.request.parse import wants_more_than_one
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
    pid = found._texts._helper.pid
    assert pid is not None
    return pid


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


async def test_bodies_are_read_whatever_kills_the_process() -> None:
    async with workers() as found:
        await found.read(CHAT, chat("a"))
        first = pid_of(found)
        os.kill(first, signal.SIGKILL)
        assert isinstance(await found.read(CHAT, chat("a")), BodyFields)
        assert pid_of(found) != first
        jobs = asyncio.gather(*(found.read(CHAT, chat("a" * 20_000_000)) for _ in range(3)))
        await asyncio.sleep(0.01)
        os.kill(pid_of(found), signal.SIGKILL)
        assert all(isinstance(fields, BodyFields) for fields in await jobs)


async def test_a_body_is_read_when_the_process_has_been_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gorgo.live.helper_process.CHECK_S", 0.4)
    async with workers() as found, asyncio.timeout(JOB_TIMEOUT_S):
        await found.read(CHAT, chat("a"))
        os.kill(pid_of(found), signal.SIGSTOP)
        assert isinstance(await found.read(CHAT, chat("a")), BodyFields)


async def test_cancelled_job_leaves_no_half_read_result_to_the_next() -> None:
    async with workers() as found:
        job = asyncio.create_task(found.read(CHAT, chat("a" * 20_000_000)))
        while found._texts._helper.pid is None:
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


async def test_bodies_of_clients_take_turns_however_many_one_has_sent() -> None:
    turns, order = Turns(32), []

    async def read(client: str) -> None:
        await turns.wait(client)
        order.append(client)
        await asyncio.sleep(0)
        turns.release()

    async with asyncio.TaskGroup() as tasks:
        for client in ("alice",) * 20 + ("bob",) * 2 + ("carol",):
            tasks.create_task(read(client))
    assert order[:6] == ["alice", "alice", "bob", "carol", "alice", "bob"]
    assert order[6:] == ["alice"] * 17


async def test_a_client_that_has_filled_a_lane_makes_room_for_another_and_for_none_of_its_own() -> None:
    turns = Turns(8)
    await turns.wait("alice")
    alice = [asyncio.create_task(turns.wait("alice")) for _ in range(7)]
    await asyncio.sleep(0)
    with pytest.raises(HttpError) as refused:
        await turns.wait("alice")
    assert refused.value.status == 429
    bob = [asyncio.create_task(turns.wait("bob")) for _ in range(3)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [task.done() for task in alice] == [False] * 4 + [True] * 3
    assert [getattr(task.exception(), "status", None) for task in alice[4:]] == [429] * 3
    alice[0].cancel()  # leaves
    turns.release()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert alice[1].done()
    assert not bob[0].done()
    turns.release()
    bob[0].cancel()  # at the moment of its turn, which goes on to the next
    for _ in range(3):
        await asyncio.sleep(0)
    assert bob[0].cancelled()
    assert alice[2].done()
    for task in (*alice, *bob):
        task.cancel()
    await asyncio.gather(*alice, *bob, return_exceptions=True)


async def test_job_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "JOB_TIMEOUT_S", 0.0)  # of the start too
    async with workers() as found:
        with pytest.raises(HttpError) as caught:
            await found.read(CHAT, chat("a"))
        assert caught.value.status == 500
        assert found._texts._helper.pid is None


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
    assert [answer[:2] for answer in reader(FINGERPRINTER)(CHAT.encode(), b"{}")] == [(413, "request_too_large")]
