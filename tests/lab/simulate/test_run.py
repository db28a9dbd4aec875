from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from joblib import Parallel

from gorgo.errors import ConfigError, TraceError, UnknownPolicy, UnknownScenario, WeightsError
from gorgo.lab.sim.named_fleets import NamedFleet
from gorgo.lab.sim.routers.group import RouterGroup
from gorgo.lab.simulate import SimJob, run, run_many, run_once
from gorgo.lab.simulate.job import SimulatedRun
from gorgo.lab.traces import TraceFilters
from tests.lab.sim.feeds import conversations
from tests.lab.sim.fleets import three_regions

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
