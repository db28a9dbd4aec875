"""A file as ART-Chat-2.5M is described, made by hand: stamps count from the week's first request, bodies are told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gorgo.errors import TraceError
from gorgo.lab.traces import TraceFilters, load_trace, parse_window
from gorgo.lab.traces import load as loading

DAY_S = 86_400


def row(time_s: float, *, turns: int = 2) -> dict[str, Any]:
    talk = [{"role": role, "content": "words"} for _ in range(turns) for role in ("user", "assistant")][:-1]
    return {
        "response": None,
        "request": {"messages": [{"role": "system", "content": "be"}, *talk], "model": "m"},
        "hash_ids": ["91a", "17"],
        "output_length": 300,
        "timestamp": time_s * 1000,
        "system_prompt_hash": "s",
        "input_length": 900,
        "token_hash": f"user {time_s % 2:.0f}",
    }


@pytest.fixture
def day_5(tmp_path: Path) -> Path:
    """A request a minute from 16:00 to 17:00 on April 5; then a line that must never be read."""
    stamps = [4 * DAY_S + 16 * 3600 + minute * 60 for minute in range(61)]
    path = tmp_path / "artchat_week_20260405.jsonl"
    path.write_text("".join(json.dumps(row(stamp)) + "\n" for stamp in stamps) + "nonsense\n")
    return path


def window(start: str, end: str) -> TraceFilters:
    start_s, end_s, from_zero = parse_window(start, end)
    return TraceFilters(start_s=start_s, end_s=end_s, from_zero=from_zero, max_output=128)


def test_a_window_by_date_is_cut_out_of_a_day_and_begins_at_0(day_5: Path) -> None:
    requests = load_trace(day_5, window("2026-04-05T16:15", "2026-04-05T16:45"))
    assert [request.timestamp_s for request in requests] == [60.0 * minute for minute in range(30)]
    assert [request.index for request in requests] == list(range(15, 45))
    assert {request.turns for request in requests} == {2}
    assert {request.output_tokens for request in requests} == {128}


def test_reading_stops_behind_the_window(day_5: Path) -> None:
    load_trace(day_5, window("2026-04-05T16:15", "2026-04-05T16:45"))
    with pytest.raises(TraceError, match="line 62: 'nonsense' is not JSON"):
        load_trace(day_5, window("2026-04-05T16:15", "2026-04-05T17:30"))


def test_an_offset_counts_from_the_file_s_first_request_all_the_same(day_5: Path) -> None:
    requests = load_trace(day_5, TraceFilters(start_s=900, end_s=2700))
    assert requests[0].index == 15


def test_another_day_s_file_has_nothing_of_the_window(day_5: Path) -> None:
    with pytest.raises(TraceError, match="no request is left"):
        load_trace(day_5, window("2026-04-04T16:15", "2026-04-04T16:45"))


def test_only_what_is_kept_is_ever_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file's lines are drawn one by one: at any time few beyond the kept ones have been asked for."""
    drawn: list[int] = []

    def endless(path: Path) -> Iterator[str]:
        minute = 0
        while True:
            drawn.append(minute)
            yield json.dumps(row(4 * DAY_S + minute * 60))
            minute += 1

    monkeypatch.setattr(loading, "_lines", endless)
    assert len(load_trace("week.jsonl", window("2026-04-05T00:10", "2026-04-05T00:20"))) == 10
    assert len(drawn) <= 23


def test_a_line_without_end_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "LINE_BYTES_MAX", 1000)
    path = tmp_path / "t.jsonl"
    path.write_text("x" * 5000)
    with pytest.raises(TraceError, match="line 1: over 1,000 bytes; expected JSON lines"):
        load_trace(path)
