"""Log lines for programs and for readers."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gorgo.config.model import Config
from gorgo.core.fleet.replica import accelerator_code
from gorgo.core.training.candidate_table import CANDIDATE_COLUMNS
from gorgo.errors import ConfigError
from gorgo.lab.learn import read_outcomes
from gorgo.lab.request_log import read_request_log
from gorgo.live import logs
from gorgo.live.logs import (
    LOGGER,
    MAX_WAIT_S,
    MAX_WAITING_LINES,
    Finished,
    JsonLines,
    LineLog,
    RequestLogFile,
    TextLines,
    flush_logs,
    log,
    log_failure,
    log_request,
    logged_hashes,
    set_up_logs,
)
from gorgo.live.telemetry.outcome_log import outcome_log_file
from tests.proxy.conftest import QUIET, Running, Start, config_for, until, with_replica
from tests.proxy.fakes import DONE, USAGE, Script, answer, chat, delta, stream


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = LOGGER.handlers[:], LOGGER.level, LOGGER.propagate
    yield
    LOGGER.handlers[:], LOGGER.level, LOGGER.propagate = before


def record(event: str, level: int = logging.INFO, **fields: object) -> logging.LogRecord:
    made = LOGGER.makeRecord(LOGGER.name, level, "", 0, event, (), None, extra={"fields": fields})
    made.created = 1_700_000_000.25
    return made


def test_json_line_is_one_object_with_all_fields() -> None:
    line = JsonLines().format(record("replica_ejected", logging.WARNING, replica="b", reason=None))
    assert json.loads(line) == {
        "time": "2023-11-14T22:13:20.250+00:00",
        "level": "warning",
        "event": "replica_ejected",
        "replica": "b",
        "reason": None,
    }


def test_json_line_has_each_value_as_the_standard_encoder_writes_it() -> None:
    values = {"a": 'q"\n\u00e9', "b": 1, "c": True, "d": 0.5, "e": float("nan"), "f": [1, "x"], "g": {"h": None}}
    line = JsonLines().format(record("x", logging.INFO, **values))
    assert line.endswith(json.dumps({**values, "e": None})[1:]), "NaN is no JSON"
    for name, value in values.items():
        line = JsonLines().format(record("x", logging.INFO, **{name: value, "d": 0.5}))
        assert line.endswith(json.dumps({name: None if name == "e" else value, "d": 0.5})[1:])


@pytest.mark.parametrize("text", ["\x7f", "\ud800", "\U0001f600", "a\r\n\x00\x1b/", "\\u007f"])
def test_a_json_line_is_ascii_whatever_a_client_sent(text: str) -> None:
    line = JsonLines().format(record("x", logging.INFO, model=text, tokens=1 << 70))
    assert line.endswith(json.dumps({"model": text, "tokens": 1 << 70})[1:])
    line = JsonLines().format(record("x", logging.INFO, model=text))
    assert line.endswith(f', "model": {json.dumps(text)}}}')


def test_times_of_lines_have_milliseconds_in_any_second() -> None:
    lines, times = JsonLines(), [1_700_000_000.25, 1_700_000_000.9996, 1_700_000_001.0, 1_699_999_999.0004]
    assert [json.loads(lines.line(at, "info", "x", {}))["time"][11:] for at in times] == [
        "22:13:20.250+00:00",
        "22:13:20.999+00:00",
        "22:13:21.000+00:00",
        "22:13:19.000+00:00",
    ]


def test_text_lines_have_columns_and_no_unknown_field() -> None:
    lines = [
        TextLines().format(record("replica_ejected", logging.WARNING, replica="b", reason=None)),
        TextLines().format(record("request", request_id="x", status=200, ttft_ms=12.5, models=["a"], note="two words")),
        TextLines().format(record("stopped")),
    ]
    assert lines == [
        "2023-11-14 22:13:20.250Z warning replica_ejected          replica=b",
        "2023-11-14 22:13:20.250Z info    request                  "
        'status=200 ttft_ms=12.5 models=["a"] note="two words" request_id=x',
        "2023-11-14 22:13:20.250Z info    stopped",
    ]


def test_text_of_several_lines_is_indented_and_control_characters_are_not_printed() -> None:
    error = "regions.yaml: 1 error\n  limits (line 3): \x1b[2J"
    assert TextLines().format(record("config_refused", logging.ERROR, error=error, by="a\rb")).splitlines() == [
        "2023-11-14 22:13:20.250Z error   config_refused           by=a?b",
        "    regions.yaml: 1 error",
        "      limits (line 3): ?[2J",
    ]


def test_a_name_that_another_sends_begins_no_line_of_the_text_log() -> None:
    for end in ("\n", "\r\n", "\u2028", "\x0b"):
        line = TextLines().format(record("request", logging.INFO, model=f"m{end}2026-01-01 00:00:00Z error forged=1"))
        assert line.splitlines() == [line], end
        assert "\n" not in line


def test_fault_of_the_proxy_has_its_place_in_both_formats(capsys: pytest.CaptureFixture[str]) -> None:
    for form in ("text", "json"):
        set_up_logs(form)
        try:
            raise ValueError("a prompt")
        except ValueError as failure:
            log_failure("internal_error", failure, request_id="r")
    text, line = capsys.readouterr().err.splitlines()
    assert " error   internal_error           error=ValueError where=test_logs.py:" in text
    assert (json.loads(line)["error"], "a prompt" in text + line) == ("ValueError", False)


@pytest.mark.parametrize(("level", "events"), [("debug", "di we"), ("info", "i we"), ("warning", "we"), ("error", "e")])
def test_level_is_the_least_that_is_printed(level: str, events: str, capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logs("json", level)
    for word in ("debug", "info", "warning", "error"):
        log(word, level=logging.getLevelName(word.upper()))
    printed = [json.loads(line)["event"][0] for line in capsys.readouterr().err.splitlines()]
    assert "".join(printed) == events.replace(" ", "")


def events(capsys: pytest.CaptureFixture[str]) -> list[tuple[str, int | None]]:
    entries = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    return [(entry["event"], entry.get("number")) for entry in entries]


async def test_lines_of_requests_wait_for_each_other_and_come_before_any_later_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    set_up_logs("json")
    for number in (1, 2):
        log_request({"number": number})
    assert events(capsys) == []
    log("replica_ejected", level=logging.WARNING)
    assert events(capsys) == [("request", 1), ("request", 2), ("replica_ejected", None)]


async def test_a_line_of_a_request_waits_for_a_bounded_time(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logs("json")
    began_s = asyncio.get_running_loop().time()
    log_request({"number": 1})
    while not (found := events(capsys)):
        assert asyncio.get_running_loop().time() < began_s + 50 * MAX_WAIT_S
        await asyncio.sleep(MAX_WAIT_S / 4)
    assert found == [("request", 1)]


async def test_a_bounded_number_of_lines_waits(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logs("json")
    for number in range(MAX_WAITING_LINES + 1):
        log_request({"number": number})
    assert events(capsys) == [("request", number) for number in range(MAX_WAITING_LINES)]
    flush_logs()
    assert events(capsys) == [("request", MAX_WAITING_LINES)]


async def test_a_waiting_line_has_its_own_time_and_the_form_of_a_record(capsys: pytest.CaptureFixture[str]) -> None:
    for form in ("json", "text"):
        set_up_logs(form)
        log_request({"status": 200, "code": None})
        log("request", status=200, code=None)
    lines = capsys.readouterr().err.splitlines()
    times = [json.loads(line).pop("time") for line in lines[:2]]
    assert times[0] <= times[1]
    assert lines[0].replace(times[0], "") == lines[1].replace(times[1], "")
    assert lines[2][24:] == lines[3][24:]


async def test_requests_below_the_level_leave_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logs("json", "warning")
    log_request({"number": 1})
    flush_logs()
    assert events(capsys) == []


def test_the_end_of_the_process_writes_waiting_lines() -> None:
    program = (
        "import asyncio; from gorgo.live.logs import log_request, set_up_logs\n"
        "async def main():\n    set_up_logs(); log_request({'number': 1}); raise SystemExit(3)\n"
        "asyncio.run(main())"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, [json.loads(line)["number"] for line in ended.stderr.splitlines()]) == (3, [1])


# --- Logs of requests and outcomes: bounded, never in a request's way, and what their lines have.


# --- The queue before the log: bounded, never in a request's way, and honest about what it lost.


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


# --- Lines on disk: what is in them, when files turn over, and what an interrupted one leaves.


def finished(received_s: float = 1000.5, hashes: tuple[int, ...] = (1, 2**64 - 1), **changes: Any) -> Finished:
    fields: dict[str, Any] = {
        "model": "m",
        "input_tokens": 1100,
        "output_tokens": 20,
        "text_bytes": 4400,
        "status": 200,
    }
    return Finished(received_s, hashes=struct.pack(f"<{len(hashes)}Q", *hashes), **(fields | changes))


def log_file(path: Path, **options: Any) -> RequestLogFile:
    fields: dict[str, Any] = {"boot_id": "boot", "clock": lambda: 999.0, "block_bytes": 2048}
    return RequestLogFile(path, **(fields | options))


def entries(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_file_begins_with_a_header_and_has_a_line_per_request(tmp_path: Path) -> None:
    file = log_file(tmp_path / "log")
    file.open()
    file.write([finished(), finished(1001.0, (), model=None, output_tokens=None, status=499)])
    file.close()
    header, one, other = entries(tmp_path / "log")
    assert header == {"gorgo_request_log": 1, "boot_id": "boot", "started_s": 999.0, "block_bytes": 2048}
    assert one == {
        "received_s": 1000.5,
        "model": "m",
        "client": None,
        "input_tokens": 1100,
        "output_tokens": 20,
        "text_bytes": 4400,
        "status": 200,
        "replica": None,
        "cached_tokens": None,
        "attempts": 0,
        "queued_s": None,
        "ttft_s": None,
        "e2e_s": None,
        "ttft_parts_s": None,
        "boundaries": [],
        "block_hashes": ["0000000000000001", "ffffffffffffffff"],
    }
    assert (other["model"], other["output_tokens"], other["block_hashes"]) == (None, None, [])


def test_name_of_a_model_cannot_break_a_line(tmp_path: Path) -> None:
    file = log_file(tmp_path / "log")
    file.write([finished(model='a"\n\u2028{')])
    assert entries(tmp_path / "log")[1]["model"] == 'a"\n\u2028{'
    file.close()


def test_full_file_turns_over_and_only_so_many_stay(tmp_path: Path) -> None:
    file = log_file(tmp_path / "log", max_bytes=1000, max_files=3)
    for number in range(60):
        file.write([finished(float(number))])
    file.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "log.1", "log.2"]
    assert all(path.stat().st_size <= 1000 for path in tmp_path.iterdir())
    kept = [entry for name in ("log.2", "log.1", "log") for entry in entries(tmp_path / name)]
    assert all("gorgo_request_log" in entries(path)[0] for path in tmp_path.iterdir())
    times = [entry["received_s"] for entry in kept if "received_s" in entry]
    assert times == [float(number) for number in range(60 - len(times), 60)]
    assert len(times) > 5


def test_next_run_goes_on_in_the_same_file_under_its_own_header(tmp_path: Path) -> None:
    for boot in ("one", "two"):
        file = log_file(tmp_path / "log", boot_id=boot)
        file.open()
        file.write([finished()])
        file.close()
    assert [entry.get("boot_id") for entry in entries(tmp_path / "log")] == ["one", None, "two", None]


@pytest.mark.parametrize("removed", [False, True])
def test_file_that_another_program_rotates_is_begun_anew_without_a_signal(tmp_path: Path, removed: bool) -> None:
    file = log_file(tmp_path / "log")
    file.open()
    file.write([finished(1.0)])
    os.rename(tmp_path / "log", tmp_path / "log-2026")
    if removed:
        (tmp_path / "log-2026").unlink()
    file.write([finished(2.0)])
    file.write([finished(3.0)])
    file.close()
    header, *lines = entries(tmp_path / "log")
    assert "gorgo_request_log" in header
    assert [line["received_s"] for line in lines] == [2.0, 3.0]
    if not removed:
        assert [line.get("received_s") for line in entries(tmp_path / "log-2026")] == [None, 1.0]


def test_file_in_the_place_of_a_rotated_one_is_appended_to_under_a_header(tmp_path: Path) -> None:
    file = log_file(tmp_path / "log")
    file.open()
    os.rename(tmp_path / "log", tmp_path / "log-2026")
    (tmp_path / "log").touch()  # `create` of logrotate
    file.write([finished(2.0)])
    file.close()
    assert [line.get("received_s") for line in entries(tmp_path / "log")] == [None, 2.0]


def test_file_that_another_program_truncates_begins_with_a_header_again(tmp_path: Path) -> None:
    file = log_file(tmp_path / "log")
    file.open()
    file.write([finished(1.0)])
    os.truncate(tmp_path / "log", 0)  # `copytruncate` of logrotate
    file.write([finished(2.0)])
    file.write([finished(3.0)])
    file.close()
    assert [line.get("received_s") for line in entries(tmp_path / "log")] == [None, 2.0, 3.0]


def test_lines_of_a_place_that_takes_no_file_any_more_are_not_counted_as_written(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    file = log_file(folder / "log")
    file.open()
    (folder / "log").unlink()
    folder.rmdir()
    with pytest.raises(FileNotFoundError):
        file.write([finished(1.0)])


def test_line_that_was_cut_off_ends_before_the_next_header(tmp_path: Path) -> None:
    (tmp_path / "log").write_text('{"received_s": 1.0, "mod')
    file = log_file(tmp_path / "log")
    file.open()
    file.close()
    cut, header = (tmp_path / "log").read_text().splitlines()
    assert cut == '{"received_s": 1.0, "mod'
    assert "gorgo_request_log" in header


def test_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    file = log_file(tmp_path / "log")
    file.open()
    file.close()
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("kind", ["folder", "pipe", "nowhere"])
def test_what_cannot_be_a_log_is_told_at_the_start(tmp_path: Path, kind: str) -> None:
    path = tmp_path / kind
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path = path / "log"
    with pytest.raises(ConfigError, match=r"cannot write a request log: .*; expected a file"):
        log_file(path).open()


# --- The outcome log: what it has of each attempt, that it has no text, and that a training reads it.


GOOD = stream(delta("a"), delta("b"), USAGE, DONE)


async def logging_proxy(start: Start, path: Path, *scripts: list[Script], policy: str = "gorgo-ms") -> Running:
    """A proxy with a log, in front of a replica per list."""
    replicas = [await start.replica(*script) for script in scripts]
    config = with_replica(config_for(replicas, replace(QUIET, policy=policy)), 0, accelerator="H100")
    return await start.proxy(config, replicas, outcome_log=path)


async def test_every_ended_attempt_has_a_line_with_all_candidates_and_no_text(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "outcomes.jsonl"
    fleet = await logging_proxy(start, path, [GOOD, GOOD], [GOOD, GOOD])
    secret = "a prompt that is in no log"
    for _ in range(2):
        await fleet.client.post(CHAT, content=chat(stream=True, messages=[{"role": "user", "content": secret * 50}]))
    await fleet.stop()
    text = path.read_text()
    assert secret not in text
    header, first, second = [json.loads(line) for line in text.splitlines()]
    assert header == {
        "gorgo_outcome_log": 2,
        "boot_id": fleet.state.routing.router.boot_id,
        "started_s": header["started_s"],
    }
    for line in (first, second):
        assert line["candidates"] == ["r0", "r1"]
        assert set(line["columns"]) == set(CANDIDATE_COLUMNS)
        assert line["probability"] == pytest.approx(1.0 / line["cost"].count(min(line["cost"])))
        assert len(line["cost"]) == 2
        assert (line["policy"], line["result"], line["censored"]) == ("gorgo-ms", "completed", False)
        assert 0 < line["ttft_s"] <= line["e2e_s"]
        assert (line["output_tokens"], line["prompt_tokens"]) == (2, 12)
    assert first["columns"]["accelerator"] == [accelerator_code("H100"), None]
    assert second["columns"]["cached_tokens"][second["chosen"]] > 0
    assert first["group"] == second["group"] != 0
    assert path.stat().st_mode & 0o777 == 0o600
    counted = fleet.state.telemetry.metrics.registry.get_sample_value(
        "gorgo_outcome_log_lines_total", {"result": "written"}
    )
    assert counted == 2
    rows = read_outcomes(path, ("prompt_tokens", "hit_share", "accelerator=H100", "prior_s")).rows
    assert rows.ttft_s.tolist() == pytest.approx([first["ttft_s"], second["ttft_s"]])


async def test_a_failed_attempt_and_its_retry_have_lines_and_one_answer_in_one_piece_has_no_first_token(
    start: Start, tmp_path: Path
) -> None:
    path = tmp_path / "outcomes.jsonl"
    scripts = [answer(500), answer(200)], [GOOD, answer(200)]
    fleet = await logging_proxy(start, path, *scripts, policy="round-robin")
    assert (await fleet.client.post(CHAT, content=chat(stream=True))).status_code == 200
    assert (await fleet.client.post(CHAT, content=chat())).status_code == 200
    await fleet.stop()
    lines = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    results = Counter((line["result"], line["censored"]) for line in lines)
    assert results == {("failed_before_content", True): 1, ("completed", False): 2}
    (whole,) = (line for line in lines if line["unstreamed"])
    assert (whole["ttft_s"], whole["e2e_s"] > 0.0) == (None, True)
    found = read_outcomes(path, ("prompt_tokens", "streamed"))
    assert (len(found.rows), found.left_out) == (3, 0)
    assert found.rows.unstreamed.tolist() == [line["unstreamed"] for line in lines]
    assert found.rows.ttft_s[found.rows.unstreamed].tolist() == [whole["e2e_s"]]


def test_a_wrong_path_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write an outcome log: No such file or directory; expected a file"):
        outcome_log_file(tmp_path / "no" / "log", boot_id="b", clock=lambda: 0.0).open()


async def test_a_full_disk_is_logged_and_routing_goes_on(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logs, "FLUSH_S", 0.01)
    path = tmp_path / "outcomes.jsonl"
    fleet = await logging_proxy(start, path, [GOOD, GOOD])

    def fail(descriptor: int, data: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gorgo.live.logs.os.write", fail)
    for _ in range(2):
        assert (await fleet.client.post(CHAT, content=chat(stream=True))).status_code == 200
    await fleet.stop()
    monkeypatch.undo()
    assert [record.getMessage() for record in caplog.records].count("outcome_log_failed") == 1
    counted = fleet.state.telemetry.metrics.registry.get_sample_value(
        "gorgo_outcome_log_lines_total", {"result": "failed"}
    )
    assert counted == 2
