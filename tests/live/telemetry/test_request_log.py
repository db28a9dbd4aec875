"""The queue before the log: bounded, never in a request's way, and honest about what it lost."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gorgo.config.model import Config
from gorgo.lab.request_log import read_request_log
from gorgo.live import logs
from gorgo.live.logs import Finished, LineLog, RequestLogFile, logged_hashes
from tests.proxy.conftest import QUIET, Start, config_for, until
from tests.proxy.fakes import DONE, USAGE, answer, chat, delta, stream

CHAT = "/v1/chat/completions"


class Disk(RequestLogFile):
    """A file that fails while it is told to."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, boot_id="b", clock=lambda: 0.0, block_bytes=2048)
        self.full = False

    def write(self, requests: Any) -> None:
        if self.full:
            raise OSError(28, "No space left on device")
        super().write(requests)


def add(log: LineLog, times: int = 1) -> None:
    for _ in range(times):
        log.add(Finished(1.0, None, 1024, 1, 4096, 200, logged_hashes(bytes(range(8)) * 17)))


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    events: list[str] = []
    monkeypatch.setattr(logs, "log", lambda event, **_: events.append(event))
    return events


async def test_what_is_too_much_is_dropped_counted_and_said_once(tmp_path: Path, said: list[str]) -> None:
    counts: Counter[str] = Counter()
    log = LineLog(Disk(tmp_path / "log"), count=lambda result, lines: counts.update({result: lines}), max_waiting=3)
    add(log, 10)
    log.stop()
    await log.run()
    log.close()
    assert counts == {"written": 3, "dropped": 7}
    assert said == ["request_log_dropped"]
    assert len((tmp_path / "log").read_text().splitlines()) == 1 + 3


async def test_full_disk_is_said_once_and_writing_goes_on_when_there_is_room(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "FLUSH_S", 0.001)
    counts: Counter[str] = Counter()
    disk = Disk(tmp_path / "log")
    log = LineLog(disk, count=lambda result, lines: counts.update({result: lines}))
    await fill_and_free(log, disk, counts)
    assert said == ["request_log_failed", "request_log_resumed"]
    assert counts == {"failed": 3, "written": 1}


async def fill_and_free(log: LineLog, disk: Disk, counts: Counter[str]) -> None:
    task = asyncio.create_task(log.run())
    disk.full = True
    for failed in (1, 2, 3):
        add(log)
        await until(lambda failed=failed: counts["failed"] == failed)  # type: ignore[misc]
    disk.full = False
    add(log)
    await until(lambda: counts["written"] == 1)
    log.stop()
    await task
    log.close()


async def test_every_eighth_hash_is_written(tmp_path: Path) -> None:
    log = LineLog(Disk(tmp_path / "log"), count=lambda *_: None)
    add(log)
    log.stop()
    await log.run()
    log.close()
    line = json.loads((tmp_path / "log").read_text().splitlines()[1])
    assert line["block_hashes"] == ["0706050403020100"] * 2


async def test_proxy_writes_what_was_asked_and_it_reads_as_a_trace(start: Start, tmp_path: Path) -> None:
    good, bad = stream(delta("a"), USAGE, DONE), answer(400)
    replica = await start.replica(good, good, bad, good)
    config: Config = config_for([replica], QUIET)
    path = tmp_path / "requests.jsonl"
    fleet = await start.proxy(config, [replica], request_log=path)
    long = "x" * 5000
    for _ in range(2):
        await fleet.client.post(CHAT, content=chat(stream=True, messages=[{"role": "user", "content": long}]))
    assert (await fleet.client.post(CHAT, content=chat())).status_code == 400
    assert (await fleet.client.post(CHAT, content=b"no json")).status_code == 400
    await fleet.client.post(CHAT, content=chat(stream=True, model="y" * 300))
    await fleet.stop()
    text = path.read_text()
    assert long[:20] not in text
    header, *lines = [json.loads(line) for line in text.splitlines()]
    assert header["boot_id"] == fleet.state.routing.router.boot_id
    assert [line["status"] for line in lines] == [200, 200, 400, 200]
    assert [line["model"] for line in lines] == ["m", "m", "m", None]
    assert [len(line["block_hashes"]) for line in lines] == [2, 2, 0, 0]
    assert lines[0]["block_hashes"] == lines[1]["block_hashes"]
    assert (lines[0]["input_tokens"], lines[0]["output_tokens"]) == (12, 2)
    assert abs(lines[0]["received_s"] - header["started_s"]) < 60
    assert (
        fleet.state.telemetry.metrics.registry.get_sample_value("gorgo_request_log_lines_total", {"result": "written"})
        == 4
    )

    trace = read_request_log(path)
    assert (len(trace.requests), trace.skipped, trace.boots) == (3, 1, 1)


@pytest.mark.parametrize(
    ("error", "reason"),
    [(OSError(28, "No space left on device"), "No space left on device"), (ValueError("file closed"), "file closed")],
)
async def test_a_failure_to_write_is_logged_with_its_reason(
    error: Exception, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[tuple[str, object]] = []
    monkeypatch.setattr(logs, "log", lambda event, **fields: logged.append((event, fields.get("reason"))))

    def fail(*_: object) -> None:
        raise error

    disk = Disk(tmp_path / "log")
    monkeypatch.setattr(disk, "write", fail)
    log = LineLog(disk, count=lambda *_: None)
    add(log)
    log.stop()
    await log.run()
    log.close()
    assert logged == [("request_log_failed", reason)]
