"""The row of a simulation and its goodput, from records made by hand."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gorgo.cli import app
from gorgo.lab.rank import rank_table, read_rows
from gorgo.lab.results import Spread
from gorgo.lab.sim.engine.itl import ItlHistogram
from gorgo.lab.sim.lower_bound import lower_bound
from gorgo.lab.sim.records import SimRecord, SimResult
from gorgo.lab.sim.workload import SimRequest
from gorgo.lab.simulate import SimJob, SimulatedRun
from gorgo.lab.simulate.job import goodput_of
from gorgo.lab.simulate.rows import floor_run, simulated_run, trace_name
from tests.lab.sim.fleets import three_regions


def job(**options: Any) -> SimJob:
    return SimJob(**{"trace": "folder/t.jsonl", "policy": "gorgo", "fleet": three_regions(), **options})


def record(scheduled_s: float, **known: Any) -> SimRecord:
    return SimRecord(**{"id": "r", "scheduled_s": scheduled_s, "sent_s": scheduled_s, "input_tokens": 100, **known})


#: Three good requests in five seconds, and two that failed: one late in its stream, one turned away at once.
RECORDS = [
    record(
        0.0, replica="x", cached_tokens=50, estimated_cached_tokens=40, predicted_ttft_ms=14.0, ttft_ms=10.0, e2e_s=1.0
    ),
    record(1.0, replica="x", input_tokens=300, cached_tokens=250, ttft_ms=30.0, e2e_s=3.0, queued_s=0.5),
    record(2.0, replica="y", estimated_cached_tokens=60, predicted_ttft_ms=18.0, ttft_ms=20.0, e2e_s=2.0, hedged=True),
    record(
        4.0,
        replica="y",
        cached_tokens=100,
        estimated_cached_tokens=100,
        predicted_ttft_ms=1.0,
        ttft_ms=1900.0,
        e2e_s=9.0,
        error="disconnected",
    ),
    record(5.0, error="deadline_unreachable", e2e_s=0.0, queued_s=0.1),
]


def run_of(records: list[SimRecord], gaps: list[tuple[float, int]], **options: Any) -> SimulatedRun:
    pooled = ItlHistogram()
    pooled.add(gaps)
    return simulated_run(job(**options), {"w": 1.0}, SimResult(records, pooled, ended_s=99.0, events=1))


def test_a_row_sums_up_good_requests() -> None:
    row = run_of(RECORDS, [(0.01, 90), (0.1, 8), (1.0, 2)], seed=3, time_scale=2.0).row
    assert (row.trace, row.time_scale, row.policy, row.weights, row.seed) == ("t.jsonl", 2.0, "gorgo", {"w": 1.0}, 3)
    assert (row.source, row.n, row.errors, row.slip_ms_p95) == ("simulated", 5, 2, 0.0)
    # Of 10, 20 and 30 ms and of 1, 2 and 3 s: what failed has no part in latency.
    assert astuple(row.ttft_ms) == pytest.approx((20.0, 20.0, 29.0, 29.8))
    assert astuple(row.e2e_s) == pytest.approx((2.0, 2.0, 2.9, 2.98))
    # A hundred gaps: 90 of 10 ms, 8 of 100 ms and 2 of a second.
    assert row.itl_ms.mean == pytest.approx(37.0)
    assert astuple(row.itl_ms)[1:] == pytest.approx((10.0, 100.0, 1000.0), rel=0.01)
    assert (row.cache_hit, row.cache_hit_estimated) == (300 / 400, 100 / 200)
    assert row.share == {"x": 2 / 3, "y": 1 / 3}
    # Predictions are off by 4 and 2 ms.
    assert astuple(row.prediction_error_ms)[:3] == pytest.approx((3.0, 3.0, 3.9))


def test_a_row_has_the_figures_beside_latencies() -> None:
    known = [
        record(0.0, output_tokens=11, ttft_ms=100.0, e2e_s=1.1, predicted_ttft_ms=110.0),
        record(1.0, output_tokens=1, ttft_ms=500.0, e2e_s=0.5, predicted_ttft_ms=400.0),
        record(2.0, output_tokens=21, ttft_ms=2_500.0, e2e_s=9.0),
        record(3.0, error="disconnected", output_tokens=99, ttft_ms=1.0, e2e_s=50.0),
    ]
    row = run_of(known, []).row
    # 1,000 ms over 10 gaps and 6,500 over 20; one token has no gap.
    assert row.tpot_ms.mean == pytest.approx((100.0 + 325.0) / 2)
    assert row.e2e_per_token_ms.mean == pytest.approx((100.0 + 500.0 + 9_000 / 21) / 3)
    # 33 tokens until the last good end at 11 s; two of four within the bounds; 10 % and 20 % off.
    assert row.tokens_per_s == pytest.approx(33 / 11)
    assert (row.goodput, row.prediction_error_ratio) == pytest.approx((0.5, 0.15))
    assert row.preemptions == 0


def test_a_row_without_good_requests_knows_none_of_them() -> None:
    row = run_of(RECORDS[3:], []).row
    unknown = (row.tpot_ms, row.e2e_per_token_ms, row.tokens_per_s, row.prediction_error_ratio)
    assert unknown == (Spread(), Spread(), None, None)
    assert row.goodput == 0.0
    assert run_of([], []).row.goodput is None


def test_a_run_of_failures_knows_no_latency() -> None:
    row = run_of(RECORDS[3:], []).row
    assert (row.n, row.errors, row.ttft_ms, row.e2e_s, row.itl_ms) == (2, 2, Spread(), Spread(), Spread())
    assert (row.cache_hit, row.cache_hit_estimated, row.share, row.prediction_error_ms) == (None, None, {}, Spread())


def test_a_run_without_a_request_knows_no_slip_and_no_goodput() -> None:
    run = run_of([], [])
    assert (run.row.n, run.row.slip_ms_p95, run.goodput) == (0, None, None)


def test_requests_come_back_only_where_they_are_to_be_kept() -> None:
    assert run_of(RECORDS, []).requests is None
    assert run_of(RECORDS, [], keep_requests=True).requests == RECORDS


def test_goodput_is_of_all_requests_offered() -> None:
    found = run_of(RECORDS, []).goodput
    assert found is not None
    # Three of five in five seconds; two failed, two waited, one was sent twice.
    assert (found.offered, found.good, found.per_s) == (5, 3 / 5, 3 / 5)
    assert (found.rejected, found.queued, found.hedged) == (2 / 5, 2 / 5, 1 / 5)


@pytest.mark.parametrize(
    ("ttft_ms", "e2e_s", "good"),
    [
        (2000.0, 10.0, 1.0),
        (2000.1, 10.0, 0.0),
        (2000.0, 10.1, 0.0),
        (None, 10.0, 0.0),
        (2000.0, None, 0.0),
    ],
)
def test_a_bound_of_goodput_is_still_good(ttft_ms: float | None, e2e_s: float | None, good: float) -> None:
    found = goodput_of([record(7.0, ttft_ms=ttft_ms, e2e_s=e2e_s)])
    assert found is not None
    # A feed of one moment has no rate: the count stands for it.
    assert (found.good, found.per_s) == (good, good)


def test_the_floor_is_a_row_of_latencies_alone() -> None:
    feed = [
        SimRequest(
            index=n, arrival_s=n, prompt_tokens=512 * (n + 1), output_tokens=3, blocks=bytes([n]) * 8, prefix_hash=n
        )
        for n in range(2)
    ]
    floor = lower_bound(feed, three_regions())
    run = floor_run(job(policy="floor", feed=feed, keep_requests=True), feed, floor)
    assert run.requests is not None
    assert [kept.ttft_ms for kept in run.requests] == pytest.approx((floor.ttft_s * 1e3).tolist())
    assert [kept.e2e_s for kept in run.requests] == floor.e2e_s.tolist()
    assert [(kept.scheduled_s, kept.sent_s, kept.status) for kept in run.requests] == [(0, 0, 200), (1, 1, 200)]
    assert [(kept.input_tokens, kept.output_tokens) for kept in run.requests] == [(512, 3), (1024, 3)]
    row = run.row
    assert row.ttft_ms.p50 == pytest.approx(floor.ttft_s.mean() * 1e3)
    assert row.e2e_s.p50 == pytest.approx(floor.e2e_s.mean())
    assert (row.n, row.errors, row.weights, row.cache_hit, row.share, row.itl_ms) == (2, 0, None, None, {}, Spread())
    assert run.goodput is not None
    assert (run.goodput.good, run.goodput.per_s) == (1.0, 2.0)
    assert run.job.feed is None
    assert floor_run(job(policy="floor"), feed, floor).requests is None


def test_a_scenario_is_in_the_name_of_the_trace() -> None:
    assert trace_name(job()) == "t.jsonl"
    assert trace_name(job(scenario="bursts")) == "t.jsonl (bursts)"


# A shadow policy in a simulation: its ranks are in the requests, and `gorgo rank` reads them.


REGIONS = Path(__file__).parents[3] / "regions.yaml"


def simulate(out: Path, *words: str) -> int:
    shared = ["simulate", "chat-small", "--limit", "80", "--config", str(REGIONS), "--jobs", "1", "--out", str(out)]
    return CliRunner().invoke(app, [*shared, *words]).exit_code


def test_first_tokens_come_later_where_the_shadow_would_not_have_gone(tmp_path: Path) -> None:
    assert simulate(tmp_path, "--policy", "random", "--shadow", "gorgo-ms") == 0
    table = rank_table(read_rows(tmp_path / "random" / "load-1-seed-0" / "requests.jsonl"))
    assert table.shadow == "gorgo-ms"
    assert [row.rank for row in table.rows] == [1, 2, 3]
    assert table.rho is not None
    assert table.rho > 0.2


def test_a_shadow_changes_nothing_of_a_run(tmp_path: Path) -> None:
    simulate(tmp_path / "with", "--policy", "random", "--shadow", "gorgo-ms")
    simulate(tmp_path / "without", "--policy", "random")
    place = Path("random") / "load-1-seed-0" / "results.json"
    assert (tmp_path / "with" / place).read_text() == (tmp_path / "without" / place).read_text()


@pytest.mark.parametrize(("policy", "shadow"), [("gorgo", "gorgo-ms"), ("random", "round-robin"), ("random", "none")])
def test_a_shadow_that_cannot_go_with_the_policy_is_bad_usage(tmp_path: Path, policy: str, shadow: str) -> None:
    assert simulate(tmp_path, "--policy", policy, "--shadow", shadow) == 2
