"""Tests of the benchmarks' own arithmetic and parsing; what they measure is not tested."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gorgo.config.load import load_config
from gorgo.core.latency import prefill
from gorgo.lab import demo
from gorgo.lab.datasets import load_requests
from gorgo.lab.demo import DEMO_LAYOUT, FleetLayout
from gorgo.lab.results import ResultRow, Spread
from gorgo.lab.sim.fleet import fleet_of
from gorgo.policies.registry import POLICIES as REGISTERED
from tests.bench.herd import _HEADER, LAYOUT, POLICIES, SESSIONS, SPEED, TRACE, cells_of
from tests.bench.overload_lateness import WAYS, line, one, ratio
from tests.bench.relay import capacity, report, scenarios
from tests.bench.relay.profile import parse_stacks, stages
from tests.bench.relay.targets import Place, UnavailableError, other_gorgo
from tests.bench.relay.wire import NUMBER_BYTES, TOKEN_MARK, ResponseReader, number_in, request

# --- The live herd: its fleet, and the cells of a row. What starts processes is tested where the demo is.


@pytest.mark.parametrize(("layout", "replicas", "tokens_per_s"), [(LAYOUT, 8, 48_591.0), (DEMO_LAYOUT, 3, None)])
def test_a_layout_is_a_fleet_that_the_proxy_and_the_engines_read(
    tmp_path: Path, layout: FleetLayout, replicas: int, tokens_per_s: float | None
) -> None:
    path = tmp_path / "regions.yaml"
    demo.write_config(
        path,
        "lmetric",
        3,
        layout,
        {name: f"http://127.0.0.1:{9000 + place}" for place, name in enumerate(layout.replicas)},
    )
    config = load_config(path)
    fleet = fleet_of(config, source=path)
    assert (config.proxy.policy, config.simulation.seed, len(fleet.replicas)) == ("lmetric", 3, replicas)
    assert {one.spec.prefill_tokens_per_s for one in fleet.replicas} == {tokens_per_s}
    assert {one.profile.name for one in fleet.replicas} == {layout.profile}
    assert {one.region: one.link.rtt_s for one in fleet.replicas} == {
        region: rtt_ms / 1e3 for region, rtt_ms in layout.round_trip_ms.items()
    }


def test_the_trace_at_its_speed_is_a_request_per_0_4_s_and_each_policy_is_registered() -> None:
    requests = load_requests(TRACE)
    assert len({request.user for request in requests}) == SESSIONS
    assert requests[-1].timestamp_s / len(requests) / SPEED == pytest.approx(0.4, rel=0.1)
    assert set(POLICIES) <= set(REGISTERED)


def test_a_row_has_a_cell_per_column_and_unknown_ones_are_a_dash() -> None:
    known = ResultRow(
        trace="herd", time_scale=0.25, policy="lmetric", weights={}, seed=0, source="live", n=9, errors=1,
        ttft_ms=Spread(100.4, 90.0, 200.0, 300.0), e2e_s=Spread(1.0, 1.0, 2.345, 3.0), itl_ms=Spread(), cache_hit=0.75,
        cache_hit_estimated=None, share={"a": 0.25, "b": 0.75}, prediction_error_ms=Spread(), slip_ms_p95=3.21,
    )  # fmt: skip
    assert cells_of(known) == ("lmetric", "9", "1", "100", "90", "200", "300", "2.35", "75.0", "75", "3.2")
    assert len(cells_of(known)) == len(_HEADER)


# --- The benchmark of lateness: what it switches off is off, for that run alone, and rows are ratios to neither.


def test_without_clock_and_hedging_a_freeze_is_not_minded_and_the_switch_is_back_afterwards() -> None:
    neither, clock, both = (one("freezing", way, 0, requests=700) for way in WAYS)
    assert prefill.STUCK_AFTER_S == 0.3
    assert neither.goodput is not None
    assert neither.goodput.hedged == 0.0
    assert neither.row.ttft_ms != clock.row.ttft_ms
    assert "freezing   clock and hedging" in line("freezing", WAYS[2], [both], [neither])
    assert "(1.00)" in line("freezing", WAYS[0], [neither], [neither])


def test_ratios_are_of_pairs_of_one_seed() -> None:
    assert round(ratio([1.0, 9.0], [2.0, 2.0]), 6) == 1.5


# --- The relay benchmark's arithmetic: medians over rounds, differences and ratios within a round, budgets.


def run_relay_report(
    *, cpu_s: float = 0.0, requests: int = 1000, tokens: int = 0, ttft_s: float = 0.0
) -> dict[str, Any]:
    figures = {"cpu_s": cpu_s, "waited_s": 0.0, "requests": requests, "tokens": tokens, "ttft_s": [ttft_s] * 3}
    return {**figures, "bad": 0, "problem": ""}


def line_relay_report(text: str, name: str) -> list[str]:
    return next(row for row in text.splitlines() if name in row).split()


def test_added_ttft_is_the_difference_to_the_engine_in_the_same_round() -> None:
    runs = {
        (relay, "ttft_small", number): run_relay_report(ttft_s=base + extra)
        # The second round was disturbed: both were slow.
        for number, base in enumerate([0.001, 0.101, 0.001])
        for relay, extra in [("direct", 0.0), ("gorgo", 0.002)]
    }
    assert "2.00" in line_relay_report(report.table(runs), "added TTFT p50, 500 B")
    assert line_relay_report(report.budgets(runs), "added TTFT p50, 500 B")[0] == "MISSED"


def test_a_ratio_compares_figures_of_the_same_round() -> None:
    runs = {
        (relay, "events", number): run_relay_report(cpu_s=times * slow, tokens=1_000_000)
        for number, slow in enumerate([10.0, 40.0, 12.0])
        for relay, times in [("sglang-router", 2.0), ("gorgo", 2.1)]
    }
    assert "1.05x" in line_relay_report(report.table(runs), "endless streams")
    assert line_relay_report(report.budgets(runs), "endless streams")[0] == "pass"
    (events,) = [row for row in report.figures(runs) if row["name"] == "CPU per event, 64 endless streams"]
    assert events["relays"]["gorgo"] == pytest.approx({"median": 25.2, "least": 21.0, "most": 84.0})
    assert events["ratios"] == pytest.approx({"gorgo": 1.05})


def test_what_was_not_measured_is_not_judged() -> None:
    runs = {("gorgo", "events", 0): run_relay_report(cpu_s=20.0, tokens=1_000_000)}
    assert "not judged" in report.budgets(runs)
    assert "MISSED" not in report.budgets(runs)


def test_bad_responses_are_reported() -> None:
    runs = {("nginx", "events", 1): {**run_relay_report(), "bad": 2, "problem": "status 502 with 0 tokens"}}
    assert report.faults(runs) == ["nginx, events, round 1: 2 bad of 1002 (status 502 with 0 tokens)"]


def test_stacks_of_the_profiler_are_added_up() -> None:
    stacks = parse_stacks(["run (a.py);read file (b.py) 2", "run (a.py);read file (b.py) 3", "run (a.py) 1"])
    assert stacks == {("run (a.py)", "read file (b.py)"): 5, ("run (a.py)",): 1}


def test_microseconds_go_to_the_system_call_or_to_the_innermost_code_of_a_stage() -> None:
    loop = "Loop__run (loop.c)"
    stacks = parse_stacks(
        [
            f"{loop};send (gorgo/proxy/exchange/response.py);write (libc.so.6) 4",
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


# --- Which tree a relay under test runs.


def test_another_tree_may_be_a_folder_or_a_commit(tmp_path: Path) -> None:
    tree, folder = tmp_path / "compiled", tmp_path / "folder"
    tree.mkdir()
    folder.mkdir()
    place = Place(port=1, replicas=[2], folder=folder)
    assert other_gorgo(str(tree))(place).tree == tree
    with pytest.raises(UnavailableError, match="no-such-commit"):
        other_gorgo("no-such-commit")(place)


# --- Both ends of the relay benchmark read what the other end and any relay between them may write.


EVENT = b"data: {" + TOKEN_MARK + b"}\n\n"


def chunked(*chunks: bytes) -> bytes:
    framed = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + framed + b"0\r\n\r\n"


@pytest.mark.parametrize("step", [1, 2, 3, 7, 64, 10_000])
def test_tokens_are_counted_however_the_bytes_are_split(step: int) -> None:
    # The third event is split over two chunks, as a relay may re-frame it.
    data = chunked(EVENT, EVENT + EVENT[:20], EVENT[20:])
    reader = ResponseReader()
    complete = [reader.feed(data[at : at + step]) for at in range(0, len(data), step)]
    assert complete == [False] * (len(complete) - 1) + [True]
    assert (reader.status, reader.tokens) == (200, 3)


def test_a_response_with_a_length_ends_at_its_length() -> None:
    reader = ResponseReader()
    assert not reader.feed(b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nab")
    assert reader.feed(b"cd")
    assert reader.status == 503


def test_bytes_beyond_the_length_are_an_error() -> None:
    with pytest.raises(ValueError, match="more bytes"):
        ResponseReader().feed(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nab")


def test_a_reader_serves_one_response_after_another() -> None:
    reader = ResponseReader()
    assert reader.feed(chunked(EVENT))
    reader.start()
    assert reader.feed(chunked(EVENT, EVENT))
    assert reader.tokens == 2


@pytest.mark.parametrize("size", [500, 90_000])
def test_a_request_has_its_size_and_says_its_length(size: int) -> None:
    before, after = request(size, variant=3, tokens=8, gap_ms=10)
    head, _, body = (before + b"0" * NUMBER_BYTES + after).partition(b"\r\n\r\n")
    assert b"content-length: %d" % len(body) in head
    assert len(body) == size
    assert json.loads(body)["max_completion_tokens"] == 8


def test_a_number_is_found_without_parsing_and_defaults_where_it_is_missing() -> None:
    assert number_in(b'{"a":1,"seed": 25,"b":2}', b"seed", 1) == 25
    assert number_in(b'{"a":1}', b"seed", 10) == 10
