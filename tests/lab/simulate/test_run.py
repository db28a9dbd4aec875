"""One simulated run: its records, its row with goodput, and the garbage collector meanwhile."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from joblib import Parallel
from typer.testing import CliRunner

from gorgo.cli import app
from gorgo.core.dispatch.in_flight import Attempt
from gorgo.errors import ConfigError, TraceError, UnknownPolicy, UnknownScenario, WeightsError
from gorgo.lab.rank import rank_table, read_rows
from gorgo.lab.results import Spread
from gorgo.lab.sim.engine.itl import ItlHistogram
from gorgo.lab.sim.fleet import NamedFleet
from gorgo.lab.sim.lower_bound import lower_bound
from gorgo.lab.sim.records import SimRecord, SimResult
from gorgo.lab.sim.routers import RouterGroup
from gorgo.lab.sim.simulation import Simulation
from gorgo.lab.sim.workload import SimRequest
from gorgo.lab.simulate import SimJob, run, run_many, run_once
from gorgo.lab.simulate.job import SimulatedRun, goodput_of
from gorgo.lab.simulate.run import NEW_OBJECTS, floor_run, rare_collections, simulated_run, trace_name
from gorgo.lab.traces import TraceFilters
from gorgo.policies.registry import make_policy
from tests.lab.sim.fleets import conversations, three_regions

FEED = tuple(conversations(60, every_s=0.4))


def job(policy: str = "gorgo-ms", **options: Any) -> SimJob:
    return SimJob(trace="made", policy=policy, **{"feed": FEED, "fleet": three_regions(), **options})


def test_a_row_tells_what_was_run_and_that_it_was_simulated() -> None:
    run = run_once(job(weights={"lambda": 0.3}, time_scale=2.0, seed=4))
    row = run.row
    assert (row.trace, row.time_scale, row.policy, row.seed, row.source) == ("made", 2.0, "gorgo-ms", 4, "simulated")
    assert row.weights == {"m_rtt": 1.0, "m_queue": 1.0, "lambda": 0.3, "delta": 25.0, "eta": 800.0}
    assert (row.n, row.errors, row.slip_ms_p95) == (60, 0, 0.0)
    assert sum(row.share.values()) == pytest.approx(1.0)
    assert None not in (row.ttft_ms.p99, row.e2e_s.p95, row.itl_ms.p95, row.cache_hit, row.prediction_error_ms.p95)
    assert run.requests is None
    assert run.job.feed is None


def test_requests_are_kept_where_they_are_asked_for() -> None:
    requests = run_once(job(keep_requests=True)).requests
    assert requests is not None
    assert [record.id for record in requests] == [str(request.index) for request in FEED]


def test_no_policy_is_below_the_floor_and_the_oracle_predicts_best() -> None:
    floor, oracle, ours, random = (run_once(job(name)).row for name in ("floor", "oracle", "gorgo-ms", "random"))
    for row in (oracle, ours, random):
        for figure in ("mean", "p50", "p95"):
            assert getattr(floor.ttft_ms, figure) < getattr(row.ttft_ms, figure)
            assert getattr(floor.e2e_s, figure) < getattr(row.e2e_s, figure)
    assert oracle.prediction_error_ms.p50 is not None
    assert ours.prediction_error_ms.p50 is not None
    assert oracle.prediction_error_ms.p50 <= ours.prediction_error_ms.p50
    assert (floor.cache_hit, floor.share, floor.weights) == (None, {}, None)


def test_a_scenario_is_in_the_name_of_the_trace_and_changes_the_run() -> None:
    row = run_once(job(scenario="six-replicas")).row
    assert row.trace == "made (six-replicas)"
    assert "us-ashburn-1" in row.share
    assert run_once(job(scenario="bursts")).row.ttft_ms != run_once(job()).row.ttft_ms


def test_a_trace_is_loaded_filtered_and_drawn_by_seed() -> None:
    filters = TraceFilters(limit=20)
    asked = [
        SimJob(trace=trace, policy="gorgo-ms", fleet=three_regions(), filters=filters, seed=seed)
        for trace, seed in (("chat-small", 0), ("art-chat-apr5", 0), ("art-chat-apr5", 1))
    ]
    rows = [run_once(each).row for each in asked]
    assert [row.n for row in rows] == [20, 20, 20]
    assert rows[1].ttft_ms != rows[2].ttft_ms


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"policy": "best"}, UnknownPolicy),
        ({"scenario": "doom"}, UnknownScenario),
        ({"weights": {"w_rtt": 1.0}}, WeightsError),
    ],
)
def test_a_wrong_job_says_so(wrong: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        run_once(job(**wrong))


@pytest.mark.parametrize("n_jobs", [2, 1])
def test_many_runs_give_the_rows_of_single_ones(n_jobs: int) -> None:
    jobs = [job(policy, seed=seed) for seed in (0, 1) for policy in ("gorgo-ms", "random", "floor")]
    runs = run_many(jobs, n_jobs=n_jobs)
    assert isinstance(runs, Iterator)
    found = {(run.job.policy, run.job.seed): run.row for run in runs}
    assert found == {(each.policy, each.seed): run_once(each).row for each in jobs}


def test_a_time_scale_that_takes_for_ever_is_told_before_it_does() -> None:
    with pytest.raises(TraceError, match=r"made takes .* s at load 1e-30; expected a year at most"):
        run_once(job(time_scale=1e30))


def test_processes_that_runs_are_given_to_are_spared_the_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def watched(**options: Any) -> Any:
        def start(tasks: Any) -> Any:
            # What a process inherits that is started here.
            seen.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
            return Parallel(**options)(tasks)

        return start

    monkeypatch.setattr("gorgo.lab.simulate.run.Parallel", watched)
    before = signal.getsignal(signal.SIGINT)
    assert len(list(run_many([job()], n_jobs=1))) == 1
    assert signal.SIGINT in seen[0]
    assert signal.getsignal(signal.SIGINT) is before
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_ctrl_c_while_processes_start_ends_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was ignored, and the runs went on to their end."""

    def interrupted(**options: Any) -> Any:
        def start(tasks: Any) -> Any:
            signal.raise_signal(signal.SIGINT)
            return Parallel(**options)(tasks)

        return start

    monkeypatch.setattr("gorgo.lab.simulate.run.Parallel", interrupted)
    runs: list[SimulatedRun] = []
    with pytest.raises(KeyboardInterrupt):
        runs.extend(run_many([job(), job(seed=1)], n_jobs=1))
    assert runs == []


def test_preemptions_of_all_engines_are_counted_also_of_those_that_were_killed() -> None:
    """A KV pool of two prompts: the batch outgrows it as its answers grow."""
    long = tuple(replace(request, prompt_tokens=900, output_tokens=600, blocks=b"") for request in FEED)
    small = NamedFleet(
        name="small",
        description="",
        profiles=["1xH100-Llama-3.1-8B"],
        changes={"scheduler": "vllm", "kv_tokens": 4_000},
    ).fleet()
    run = partial(job, feed=long, fleet=small)
    preempted = run_once(run()).row.preemptions
    assert preempted is not None
    assert preempted > 0
    assert (run_once(run(scenario="killed")).row.preemptions or 0) > 0
    assert run_once(job()).row.preemptions == 0
    assert run_once(job("floor")).row.preemptions is None


def test_a_policy_that_learns_trains_within_its_run_and_the_same_seed_trains_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learns = job("predicted-latency", feed=tuple(conversations(300, every_s=0.4)), keep_requests=True)
    once, again = run_once(learns).requests, run_once(learns).requests
    monkeypatch.setattr(run, "_training", lambda *_: ())
    cold = run_once(learns).requests
    assert once is not None
    assert once == again != cold


def test_several_routers_run_as_one_job() -> None:
    group = RouterGroup(count=3, sharing="store")
    run = run_once(job(routers=group, keep_requests=True))
    assert (run.row.n, run.row.errors, run.job.routers) == (60, 0, group)


def test_a_policy_that_learns_is_refused_on_several_routers() -> None:
    with pytest.raises(ConfigError, match="expected one router"):
        run_once(job("gorgo-residual", routers=RouterGroup(count=2)))


# --- The row of a simulation and its goodput, from records made by hand.


def job_rows(**options: Any) -> SimJob:
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
    return simulated_run(job_rows(**options), {"w": 1.0}, SimResult(records, pooled, ended_s=99.0, events=1))


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
    run = floor_run(job_rows(policy="floor", feed=feed, keep_requests=True), feed, floor)
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
    assert floor_run(job_rows(policy="floor"), feed, floor).requests is None


def test_a_scenario_is_in_the_name_of_the_trace() -> None:
    assert trace_name(job_rows()) == "t.jsonl"
    assert trace_name(job_rows(scenario="bursts")) == "t.jsonl (bursts)"


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


# --- Python's garbage collector during a simulated run.


@pytest.fixture
def restored() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("restored")
def test_the_setting_is_restored_after_an_error() -> None:
    gc.set_threshold(900, 7, 3)
    with pytest.raises(KeyError, match="True"), rare_collections():
        raise KeyError(gc.get_threshold()[0] == NEW_OBJECTS)
    assert gc.get_threshold() == (900, 7, 3)


@pytest.mark.usefixtures("restored")
def test_a_run_beside_another_leaves_the_setting_to_it() -> None:
    gc.set_threshold(900, 7, 3)
    with rare_collections():
        with rare_collections():
            pass
        assert gc.get_threshold() == (NEW_OBJECTS, 7, 3)
    assert gc.get_threshold() == (900, 7, 3)


@pytest.mark.usefixtures("restored")
def test_a_collector_that_is_off_stays_off() -> None:
    gc.set_threshold(0)
    with rare_collections():
        assert gc.get_threshold()[0] == 0


@pytest.mark.usefixtures("restored")
def test_attempts_that_have_ended_are_freed_without_the_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        Simulation(three_regions(), make_policy("gorgo-ms"), seed=0).run(conversations(30, every_s=0.2))
        left = sum(isinstance(found, Attempt) for found in gc.get_objects())
    finally:
        gc.enable()
    assert left == 0
