"""Log lines for programs and for readers."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

from gorgo.live.logs import (
    LOGGER,
    MAX_WAIT_S,
    MAX_WAITING_LINES,
    JsonLines,
    TextLines,
    flush_logs,
    log,
    log_failure,
    log_request,
    set_up_logs,
)


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
