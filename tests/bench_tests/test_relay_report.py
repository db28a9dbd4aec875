"""The relay benchmark's arithmetic: medians over rounds, differences and ratios within a round, budgets."""

from __future__ import annotations

from typing import Any

from tests.bench.relay import report
from tests.bench.relay.profile import parse_stacks


def run(*, cpu_s: float = 0.0, requests: int = 1000, tokens: int = 0, ttft_s: float = 0.0) -> dict[str, Any]:
    figures = {"cpu_s": cpu_s, "waited_s": 0.0, "requests": requests, "tokens": tokens, "ttft_s": [ttft_s] * 3}
    return {**figures, "bad": 0, "problem": ""}


def line(text: str, name: str) -> list[str]:
    return next(row for row in text.splitlines() if name in row).split()


def test_added_ttft_is_the_difference_to_the_engine_in_the_same_round() -> None:
    runs = {
        (relay, "ttft_small", number): run(ttft_s=base + extra)
        # The second round was disturbed: both were slow.
        for number, base in enumerate([0.001, 0.101, 0.001])
        for relay, extra in [("direct", 0.0), ("gorgo", 0.002)]
    }
    assert "2.00" in line(report.table(runs), "added TTFT p50, 500 B")
    assert line(report.budgets(runs), "added TTFT p50, 500 B")[0] == "OVER"


def test_a_ratio_compares_figures_of_the_same_round() -> None:
    runs = {
        (relay, "events", number): run(cpu_s=times * slow, tokens=1_000_000)
        for number, slow in enumerate([10.0, 40.0, 12.0])
        for relay, times in [("sglang-router", 1.0), ("gorgo", 2.0)]
    }
    assert "2.00x" in line(report.table(runs), "endless streams")
    assert line(report.budgets(runs), "endless streams")[0] == "pass"


def test_what_was_not_measured_is_not_judged() -> None:
    runs = {("gorgo", "events", 0): run(cpu_s=20.0, tokens=1_000_000)}
    assert "not judged" in report.budgets(runs)
    assert "OVER" not in report.budgets(runs)


def test_bad_responses_are_reported() -> None:
    runs = {("nginx", "events", 1): {**run(), "bad": 2, "problem": "status 502 with 0 tokens"}}
    assert report.faults(runs) == ["nginx, events, round 1: 2 bad of 1002 (status 502 with 0 tokens)"]


def test_stacks_of_the_profiler_are_added_up() -> None:
    stacks = parse_stacks(["run (a.py);read file (b.py) 2", "run (a.py);read file (b.py) 3", "run (a.py) 1"])
    assert stacks == {("run (a.py)", "read file (b.py)"): 5, ("run (a.py)",): 1}
