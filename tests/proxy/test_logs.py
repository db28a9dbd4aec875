"""Log lines for programs and for readers."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from gorgo.proxy.logs import LOGGER, JsonLines, TextLines, log, log_failure, set_up_logs


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
