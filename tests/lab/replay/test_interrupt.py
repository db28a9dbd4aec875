"""`gorgo replay` as a process that is interrupted: its exit code, its summary, its files, and the report of them."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from gorgo.lab.report.report import find_results, report
from tests.lab.replay.fake_router import FakeRouter, never

ENDS_S = 60.0


def write_trace(path: Path, count: int) -> Path:
    lines = [{"timestamp": 0, "input_length": 64, "output_length": 2, "hash_ids": [n]} for n in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


async def started(*words: str | Path) -> asyncio.subprocess.Process:
    command = [sys.executable, "-m", "gorgo", "replay", *map(str, words)]
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)


async def ended(process: asyncio.subprocess.Process) -> tuple[str, str]:
    try:
        async with asyncio.timeout(ENDS_S):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return out.decode(), err.decode()


@pytest.mark.parametrize(("by", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
async def test_an_interrupted_replay_sums_up_what_has_ended(by: signal.Signals, code: int, tmp_path: Path) -> None:
    second_came = asyncio.Event()

    async def then_hangs(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if len(router.bodies) == 1:
            return await router.whole(request, body)
        if len(router.bodies) == 3:
            second_came.set()
        return await never(request, body)

    router = FakeRouter(then_hangs)
    trace, out = write_trace(tmp_path / "t.jsonl", 3), tmp_path / "out"
    async with router.running():
        process = await started(trace, "--url", router.url, "--out", out)
        async with asyncio.timeout(ENDS_S):
            await second_came.wait()
        process.send_signal(by)
        stdout, stderr = await ended(process)
    assert process.returncode == code, stderr
    assert "gorgo " in stdout
    assert f"gorgo: {by.name}: partial, the summary is of 1 of 3 requests" in stderr
    assert "Traceback" not in stderr
    (row,) = json.loads((out / "results.json").read_text())
    assert (row["n"], row["planned"], row["errors"]) == (1, 3, 0)
    assert len((out / "requests.jsonl").read_text().splitlines()) == 1
    text = report(find_results(out), ()).html
    assert "1 of 3, partial" in text
    assert "Partial: a run was interrupted; its figures are of the requests that had ended (gorgo)." in text


async def test_a_replay_interrupted_while_it_waits_for_the_port_writes_nothing(tmp_path: Path) -> None:
    closed = FakeRouter()
    async with closed.running():
        pass
    trace, out = write_trace(tmp_path / "t.jsonl", 3), tmp_path / "out"
    process = await started(trace, "--url", closed.url, "--out", out)
    assert process.stderr is not None
    line = (await process.stderr.readline()).decode()
    assert line == f"gorgo: waiting for {closed.url}, at most 10 s\n"
    process.send_signal(signal.SIGINT)
    _, stderr = await ended(process)
    assert process.returncode == 130, stderr
    assert "the summary is of 0 of 3 requests" in stderr
    assert not out.exists()


async def test_a_replay_started_before_its_router_waits_for_it(tmp_path: Path) -> None:
    router = FakeRouter()
    async with router.running():
        pass
    process = await started(write_trace(tmp_path / "t.jsonl", 2), "--url", router.url, "--json")
    assert process.stderr is not None
    assert b"waiting for" in await process.stderr.readline()
    async with router.running(port=router.port):
        stdout, stderr = await ended(process)
    assert process.returncode == 0, stderr
    (row,) = json.loads(stdout)
    assert (row["n"], row["planned"], row["errors"]) == (2, 2, 0)


async def test_a_replay_that_ends_by_itself_is_not_partial(tmp_path: Path) -> None:
    router = FakeRouter()
    async with router.running():
        process = await started(write_trace(tmp_path / "t.jsonl", 2), "--url", router.url, "--out", tmp_path / "out")
        _, stderr = await ended(process)
    assert process.returncode == 0, stderr
    assert "partial" not in stderr + report(find_results(tmp_path / "out"), ()).html
