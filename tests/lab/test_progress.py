from __future__ import annotations

import io

import pytest
from rich.console import Console

from gorgo.lab import progress
from gorgo.lab.progress import shown_progress


def shown(total: int | None, *words: str) -> str:
    out = io.StringIO()
    with shown_progress("runs of x", total, Console(file=out, width=200)) as advance:
        for each in words:
            advance(each)
    return out.getvalue()


def test_a_log_has_the_last_run_and_one_line_per_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((0.0, 3.0, 11.0, 11.0, 12.0))
    monkeypatch.setattr(progress, "monotonic", lambda: next(times))
    assert shown(None, "a", "b", "c") == "runs of x: 2 runs, b\n"
    monkeypatch.setattr(progress, "monotonic", lambda: 0.0)
    assert shown(3, "a", "b", "") == "runs of x: 3/3 runs done\n"


def test_a_terminal_has_a_bar_with_the_last_run() -> None:
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=True)
    with shown_progress("runs of x", 2, console) as advance:
        advance("first")
        advance("second")
    assert "2/2" in out.getvalue()
    assert "second" in out.getvalue()
