"""The relay benchmark's arithmetic: medians over rounds, differences and ratios within a round, budgets."""

from __future__ import annotations

from typing import Any

import pytest

from tests.bench.relay import capacity, report, scenarios
from tests.bench.relay.profile import parse_stacks, stages


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
    assert line(report.budgets(runs), "added TTFT p50, 500 B")[0] == "MISSED"


def test_a_ratio_compares_figures_of_the_same_round() -> None:
    runs = {
        (relay, "events", number): run(cpu_s=times * slow, tokens=1_000_000)
        for number, slow in enumerate([10.0, 40.0, 12.0])
        for relay, times in [("sglang-router", 2.0), ("gorgo", 2.1)]
    }
    assert "1.05x" in line(report.table(runs), "endless streams")
    assert line(report.budgets(runs), "endless streams")[0] == "pass"
    (events,) = [row for row in report.figures(runs) if row["name"] == "CPU per event, 64 endless streams"]
    assert events["relays"]["gorgo"] == pytest.approx({"median": 25.2, "least": 21.0, "most": 84.0})
    assert events["ratios"] == pytest.approx({"gorgo": 1.05})


def test_what_was_not_measured_is_not_judged() -> None:
    runs = {("gorgo", "events", 0): run(cpu_s=20.0, tokens=1_000_000)}
    assert "not judged" in report.budgets(runs)
    assert "MISSED" not in report.budgets(runs)


def test_bad_responses_are_reported() -> None:
    runs = {("nginx", "events", 1): {**run(), "bad": 2, "problem": "status 502 with 0 tokens"}}
    assert report.faults(runs) == ["nginx, events, round 1: 2 bad of 1002 (status 502 with 0 tokens)"]


def test_stacks_of_the_profiler_are_added_up() -> None:
    stacks = parse_stacks(["run (a.py);read file (b.py) 2", "run (a.py);read file (b.py) 3", "run (a.py) 1"])
    assert stacks == {("run (a.py)", "read file (b.py)"): 5, ("run (a.py)",): 1}


def test_microseconds_go_to_the_system_call_or_to_the_innermost_code_of_a_stage() -> None:
    loop = "Loop__run (loop.c)"
    stacks = parse_stacks(
        [
            f"{loop};send (gorgo/proxy/exchange/relay.py);write (libc.so.6) 4",
            f"{loop};serve (gorgo/proxy/server.py);feed (gorgo/core/stream.py);find (bytes.c) 3",
            f"{loop};serve (gorgo/proxy/server.py);choose (gorgo/core/router.py) 2",
            f"{loop} 1",
        ]
    )
    found = {name: us for name, us in stages(stacks, 50.0).items() if us}
    assert found == {
        "system call: write": 20.0,
        "first token, usage, gaps": 15.0,
        "decision, reservation": 10.0,
        "event loop, parser": 5.0,
    }


def held(streams: float, gap_s: float = 0.011, bad: int = 0) -> dict[str, Any]:
    """Figures of a second of so many streams at 100 events a second."""
    return {"tokens": 100 * streams, "wall_s": 1.0, "gap_s": [0.01, gap_s, 0.1], "bad": bad}


@pytest.mark.parametrize(
    ("relay", "carried"),
    [
        (held(400), True),
        (held(388), True),
        (held(387), False),
        (held(400, gap_s=0.021), True),
        (held(400, gap_s=0.022), False),
        (held(400, bad=1), False),
        ({**held(400), "gap_s": []}, False),
    ],
)
def test_streams_are_carried_if_their_events_come_and_come_in_time(relay: dict[str, Any], carried: bool) -> None:
    assert capacity.carries(relay, held(400)) is carried


def test_a_search_begins_where_the_last_one_ended_and_ends_where_the_engine_does() -> None:
    tried: list[tuple[str | None, int]] = []
    limit = 800

    def measure(relay: str | None, scenario: scenarios.Scenario) -> dict[str, Any]:
        streams = scenario.job["connections"]
        tried.append((relay, streams))
        return held(min(streams, limit if relay else 1000))

    search = capacity.Search(scenarios.SHORT)
    first = search.run("gorgo", measure)
    assert (first["streams"], first["limited"]) == (800, False)
    assert [streams for relay, streams in tried if relay] == [256, 400, 600, 800, 1000]
    tried.clear()
    limit = 2000
    second = search.run("gorgo", measure)
    assert (second["streams"], second["limited"]) == (1000, True)
    assert tried == [(None, 800), ("gorgo", 800), (None, 1000), ("gorgo", 1000), (None, 1200)]
    assert capacity.limits({("gorgo", capacity.NAME, 1): second}) == [
        "gorgo, round 2: more than 1000 streams are beyond the engine and the load here"
    ]


def test_the_short_plan_searches_for_gorgo_alone_and_the_full_one_not_for_nginx() -> None:
    assert [capacity.Search(scenarios.SHORT).takes(name) for name in ("gorgo", "floor")] == [True, False]
    assert [capacity.Search(scenarios.FULL).takes(name) for name in ("gorgo", "nginx")] == [True, False]
