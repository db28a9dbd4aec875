"""Workloads, their jobs, and the verdicts of targets on rows made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from experiments.comparison import MEASURES
from experiments.simulated import TaskRun
from experiments.tables import ClaimVerdict
from experiments.windows import LEARNED, PolicyTask, RatioTarget, Workload
from gorgo.lab.demo.options import BASELINES
from gorgo.lab.results import ResultRow
from gorgo.lab.sim.engine.profiles import find_profile
from gorgo.lab.sim.named_fleets import QWEN_L40S, find_fleet
from gorgo.lab.traces import TraceFilters
from tests.experiments.rows import row

HERE, THERE = Workload(name="here", traces=("t",)), Workload(name="there", traces=("t",))


def target(**changes: Any) -> RatioTarget:
    given: dict[str, Any] = {"workloads": (HERE,), "others": ("b",), "figure": "p95 TTFT", "at_most": 0.9}
    return RatioTarget(**{"group": "g", "policy": "a"} | given | changes)


def rows(policy: str, *ttft_ms: float | None) -> dict[int, ResultRow]:
    return {seed: row(policy, seed=seed, ttft_ms=value) for seed, value in enumerate(ttft_ms)}


def judge(target: RatioTarget, found: dict[tuple[Workload, str], dict[int, ResultRow]]) -> ClaimVerdict:
    runs = {
        PolicyTask(workload, policy, seed): TaskRun(row=each, cpu_s=0.0)
        for (workload, policy), by_seed in found.items()
        for seed, each in by_seed.items()
    }
    return target.verdict(runs, range(10))


def test_a_ratio_is_the_geometric_mean_over_seeds() -> None:
    verdict = judge(target(), {(HERE, "a"): rows("a", 80.0, 90.0), (HERE, "b"): rows("b", 100.0, 100.0)})
    assert verdict.value == pytest.approx((0.8 * 0.9) ** 0.5)
    assert verdict.low is not None
    assert (verdict.met, verdict.labels) == (True, ("here, load 1", "a", "b", "p95 TTFT"))


def test_a_limit_is_met_by_the_mean_and_sure_by_the_interval() -> None:
    ours, others = {(HERE, "a"): rows("a", 80.0, 82.0, 84.0)}, {(HERE, "b"): rows("b", 100.0, 100.0, 100.0)}
    near, far, beyond = (judge(target(at_most=limit), ours | others) for limit in (0.83, 0.95, 0.7))
    assert (near.met, near.sure) == (True, False)
    assert (far.met, far.sure) == (True, True)
    assert (beyond.met, beyond.sure) == (False, True)


def test_one_seed_is_never_sure() -> None:
    verdict = judge(target(), {(HERE, "a"): rows("a", 80.0), (HERE, "b"): rows("b", 100.0)})
    assert (verdict.met, verdict.sure) == (True, False)


def test_the_best_other_is_chosen_for_each_setting_by_its_mean() -> None:
    found = {
        (HERE, "a"): rows("a", 50.0, 50.0),
        (HERE, "b"): rows("b", 100.0, 100.0),
        (HERE, "c"): rows("c", 60.0, 160.0),
        (THERE, "a"): rows("a", 50.0, 50.0),
        (THERE, "b"): rows("b", 100.0, 100.0),
        (THERE, "c"): rows("c", 70.0, 90.0),
    }
    value = judge(target(others=("b", "c"), workloads=(HERE, THERE)), found).value
    assert value == pytest.approx((50 / 100 * 50 / 100 * 50 / 70 * 50 / 90) ** 0.25)


def test_several_settings_are_one_figure_per_seed() -> None:
    found = {
        (HERE, "a"): rows("a", 50.0, 50.0),
        (THERE, "a"): rows("a", 200.0, 200.0),
        (HERE, "b"): rows("b", 100.0, 100.0),
        (THERE, "b"): rows("b", 100.0, 100.0),
    }
    verdict = judge(target(workloads=(HERE, THERE)), found)
    assert (verdict.value, verdict.low, verdict.high) == pytest.approx((1.0, 1.0, 1.0))


def test_a_seed_that_lacks_a_setting_is_left_out() -> None:
    found = {
        (HERE, "a"): rows("a", 50.0, 50.0),
        (THERE, "a"): rows("a", 50.0),
        (HERE, "b"): rows("b", 100.0, 100.0),
        (THERE, "b"): rows("b", 100.0, 100.0),
    }
    verdict = judge(target(workloads=(HERE, THERE)), found)
    assert verdict.value == pytest.approx(0.5)
    assert verdict.low is None


def test_the_others_may_run_elsewhere() -> None:
    asked = target(others=("a",), others_on=(THERE,), at_most=1.05)
    verdict = judge(asked, {(HERE, "a"): rows("a", 103.0), (THERE, "a"): rows("a", 100.0)})
    assert verdict.met
    assert list(asked.tasks([0])) == [PolicyTask(HERE, "a", 0), PolicyTask(THERE, "a", 0)]


def test_what_nobody_measured_is_not_met() -> None:
    assert not judge(target(), {}).met
    verdict = judge(target(), {(HERE, "a"): rows("a", None), (HERE, "b"): rows("b", 100.0)})
    assert (verdict.value, verdict.met, verdict.sure) == (None, False, False)


@pytest.mark.parametrize(
    ("changes", "ours_ms", "said"),
    [
        ({}, [80.0], ("here, load 1", "gorgo-ms", "gorgo", "p95 TTFT", "<= 0.90", "0.800")),
        ({}, [80.0, 80.0], ("here, load 1", "gorgo-ms", "gorgo", "p95 TTFT", "<= 0.90", "0.800 [0.800, 0.800]")),
        ({"figure": "p50 TTFT"}, [90.0], ("here, load 1", "gorgo-ms", "gorgo", "p50 TTFT", "<= 0.90", "0.900")),
        ({"workloads": (THERE,)}, [80.0], ("there, load 1", "gorgo-ms", "gorgo", "p95 TTFT", "<= 0.90", "-")),
        ({"others": BASELINES}, [80.0], ("here, load 1", "gorgo-ms", "prefix-cache", "p95 TTFT", "<= 0.90", "1.600")),
        (
            {"others": ("gorgo-ms",), "others_on": (HERE,), "at_most": 1.05},
            [80.0],
            ("here, load 1", "gorgo-ms", "itself", "p95 TTFT", "<= 1.05", "1.000"),
        ),
        (
            {"workloads": (HERE, HERE), "others": BASELINES},
            [80.0],
            ("geometric mean of 2", "gorgo-ms", "the best", "p95 TTFT", "<= 0.90", "1.600"),
        ),
    ],
)
def test_a_verdict_s_cells(changes: dict[str, Any], ours_ms: list[float], said: tuple[str, ...]) -> None:
    found = {
        (HERE, "gorgo-ms"): rows("gorgo-ms", *ours_ms),
        (HERE, "gorgo"): rows("gorgo", 100.0, 100.0),
        (HERE, "prefix-cache"): rows("prefix-cache", 50.0),
        (HERE, "least-load"): rows("least-load", 70.0),
    }
    asked = target(**{"policy": "gorgo-ms", "others": ("gorgo",)} | changes)
    assert judge(asked, found).cells()[:6] == said


def test_hits_are_a_measure_of_a_row_and_unknown_is_none() -> None:
    assert MEASURES["hit"](row()) == 0.5
    assert MEASURES["mean TPOT"](row()) is None


# -- jobs

WINDOW = Workload(name="windows", traces=("one", "two"), filters=TraceFilters(max_input=9, limit=50), time_scale=1.25)


def test_a_job_has_the_fleet_of_regions_yaml_and_a_named_one_where_the_workload_says_so() -> None:
    job = PolicyTask(WINDOW.under("bursts"), "random", 5).job()
    assert (job.trace, job.policy, job.seed, job.scenario, job.time_scale) == ("two", "random", 5, "bursts", 1.25)
    assert [replica.region for replica in job.fleet.replicas] == ["us-ashburn", "eu-frankfurt", "ap-seoul"]
    assert job.limits is not None
    assert PolicyTask(WINDOW.on("h100"), "random", 0).job().fleet == find_fleet("h100")


def test_a_workload_with_a_profile_runs_on_the_paper_s_fleet_of_it() -> None:
    profile = find_profile(QWEN_L40S)
    job = PolicyTask(replace(WINDOW, profile=profile, client_concurrency=64), "random", 0).job()
    assert {replica.profile for replica in job.fleet.replicas} == {profile}
    assert (job.limits, job.client_concurrency) == (None, 64)


def test_learned_weights_are_those_of_the_published_policy() -> None:
    job = PolicyTask(WINDOW, LEARNED, 0).job()
    assert (job.policy, job.weights) == ("gorgo", {"w_rtt": 0.276, "w_queue": 0.5})
    assert PolicyTask(WINDOW, "gorgo", 0).job().weights is None


@pytest.mark.parametrize(
    ("own", "first", "limit"), [(50, None, 50), (50, 20, 20), (50, 80, 50), (None, 20, 20), (None, None, None)]
)
def test_the_smaller_bound_of_requests_counts(own: int | None, first: int | None, limit: int | None) -> None:
    workload = Workload(name="w", traces=("t",), filters=TraceFilters(limit=own, spread_s=3.0)).first(first)
    assert PolicyTask(workload, "random", 0).job().filters == TraceFilters(limit=limit, spread_s=3.0)


@pytest.mark.parametrize(
    ("workload", "label"),
    [
        (WINDOW, "windows, load 0.8"),
        (WINDOW.at(2.0), "windows, load 0.5"),
        (WINDOW.under("killed"), "windows, load 0.8, killed"),
        (WINDOW.on("h100").under("killed"), "windows, load 0.8, h100, killed"),
    ],
)
def test_a_label_has_the_load_and_what_happens(workload: Workload, label: str) -> None:
    assert workload.label == label


def test_a_workload_with_few_seeds_takes_the_first_of_the_check() -> None:
    few = target(workloads=(replace(WINDOW, seeds=2),), policy="gorgo-ms", others=("gorgo",))
    assert [(task.policy, task.seed) for task in few.tasks(range(3, 9))] == [
        ("gorgo-ms", 3),
        ("gorgo-ms", 4),
        ("gorgo", 3),
        ("gorgo", 4),
    ]
