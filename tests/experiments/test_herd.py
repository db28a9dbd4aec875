"""The claims about sessions that share a system prompt: which settings they have, and a small run of each kind."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product
from statistics import fmean
from typing import cast

import pytest

from experiments.grid import Grid
from experiments.runner import Runner
from experiments.systems import herd
from experiments.systems.herd import AGENTS, OTHERS, all_targets, report, tuner
from experiments.tuning import TuningRun, TuningTask
from experiments.windows import PolicyTask, RatioTarget, Workload
from gorgo.lab.datasets import AgentsShape, HerdShape, describe_trace, generate_requests, read_shape, shapes
from gorgo.policies.registry import POLICIES
from tuner.offline.search import RunScore


def of_group(group: str) -> list[RatioTarget]:
    return [target for target in all_targets() if target.group == group]


def settings(targets: list[RatioTarget]) -> set[tuple[int, float, str | None, float]]:
    found = set()
    for target in targets:
        (workload,) = target.workloads
        assert isinstance(workload.shape, HerdShape)
        found.add((workload.shape.groups, workload.shape.gap_s, workload.fleet, workload.pool_share))
    return found


def test_the_herd_is_run_at_every_gap_number_of_prompts_fleet_and_part_of_the_pools() -> None:
    steady = [target for group in ("herd", "herd-pools", "herd-regions") for target in of_group(group)]
    places = (("8x1xH100", 1.0), ("8x1xH100", 0.25), ("6x1xH100", 1.0), ("6x1xH100", 0.25))
    assert settings(steady) == {
        (groups, gap_s, *place) for groups, gap_s, place in product((1, 3, 10), (0.4, 1.5, 4.0, 15.0), places)
    }


def test_the_floor_bounds_what_fits_into_near_pools_and_the_pinned_row_what_does_not() -> None:
    bounds = Counter((one.group, tuple(one.others), one.figure, one.at_most) for one in all_targets())
    assert {(group, others, figure): at_most for group, others, figure, at_most in bounds if len(others) == 1} == {
        ("herd", ("floor",), "mean TTFT"): 1.1,
        ("herd", ("floor",), "p95 TTFT"): 1.1,
        ("herd-pools", ("pinned",), "mean TTFT"): 1.1,
        ("herd-regions", ("pinned",), "mean TTFT"): 1.1,
        ("herd-changing", ("pinned",), "mean TTFT"): 1.1,
    }
    assert {at_most for _, others, _, at_most in bounds if len(others) > 1} == {1.03}
    assert {one.policy for one in all_targets()} == {"gorgo-ms"}


def test_the_policy_is_compared_with_all_that_were_published_for_such_traffic() -> None:
    assert {"gorgo", "prefix-cache-and-load", "lmetric", "dualmap", "skywalker", "preble-e2"} <= set(OTHERS)
    assert set(OTHERS) <= set(POLICIES)
    for group in herd.GROUPS[:-1]:
        compared = {tuple(one.workloads): one.figure for one in of_group(group) if tuple(one.others) == OTHERS}
        assert set(compared) == {tuple(one.workloads) for one in of_group(group)}


def test_sessions_change_in_a_herd_and_come_and_go_as_agents() -> None:
    shapes_of = [one.workloads[0].shape for one in of_group("herd-changing")]
    assert {one.leaving_share for one in shapes_of if isinstance(one, HerdShape)} == {0.15}
    assert {one.sessions_per_s for one in shapes_of if isinstance(one, AgentsShape)} == {0.05, 0.1, 0.2, 0.5, 1.0}


def test_the_herd_of_the_claims_is_the_shipped_one_and_fits_into_the_context_of_the_engines() -> None:
    assert read_shape(shapes()["herd"]) == herd.HERD
    for shape in (herd.HERD, replace(AGENTS, duration_s=600.0)):
        requests = generate_requests(shape)
        assert max(one.input_tokens + one.output_tokens for one in requests) <= 32_768
    agents = describe_trace(generate_requests(replace(AGENTS, duration_s=6000.0)))
    assert agents.input_p50 == pytest.approx(24_732 - 1948 * 2.5, rel=0.2), "as long as the herd's"


SMALL = HerdShape(
    seed=0, sessions=6, rounds=3, groups=2, gap_s=0.5, system_tokens=2048, question_tokens=500, output_tokens=4,
    leaving_share=0.0,
)  # fmt: skip


def small(**changes: object) -> Workload:
    workload = Workload(name="small herd", traces=("herd",), shape=replace(SMALL, **changes))  # type: ignore[arg-type]
    return workload.on("8x1xH100", pool_share=0.25)


def test_a_shape_is_drawn_with_the_seed_on_a_part_of_the_pools() -> None:
    job = PolicyTask(small(), "gorgo-ms", 1).job()
    assert job.feed is not None
    assert len(job.feed) == 18
    assert job.feed != PolicyTask(small(), "gorgo-ms", 2).job().feed
    assert {one.profile.kv_tokens for one in job.fleet.replicas} == {112_500}
    assert PolicyTask(small().first(5), "gorgo-ms", 1).job().feed == job.feed[:5]
    assert small().label == "small herd, load 1, 8x1xH100, 1/4 of each pool"


def test_runs_of_other_shapes_and_pools_are_other_runs() -> None:
    tasks = [
        PolicyTask(small(), "gorgo", 1),
        PolicyTask(small(), "gorgo", 2),
        PolicyTask(small(gap_s=0.6), "gorgo", 1),
        PolicyTask(small().on("8x1xH100"), "gorgo", 1),
        PolicyTask(small(), "lmetric", 1),
    ]
    assert len({task.key() for task in tasks}) == len(tasks)
    assert PolicyTask(replace(small(), name="other"), "gorgo", 1).key() == tasks[0].key()


def test_a_group_prints_its_targets_and_the_means_of_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    few = [
        replace(target, workloads=(small().on("6x1xH100"),), others=target.others[:2])
        for target in (of_group("herd")[0], of_group("herd")[-1])
    ]
    monkeypatch.setattr(herd, "all_targets", lambda: few)
    found = report(["herd"], Grid(seeds=range(2)), Runner(None, n_jobs=1, show_progress=False))
    assert [row["group"] for row in found.rows] == ["herd", "herd"]
    means = found.sections[-1]
    assert tuple(means.header) == herd.MEANS_HEADER
    assert [row[1] for row in means.rows] == ["floor", "gorgo", "gorgo-ms", "prefix-cache-and-load"]
    assert all(row[2] != "-" for row in means.rows)


def test_the_tuner_s_rows_have_the_share_of_one_replica_before_and_after() -> None:
    def run(task: TuningTask) -> TuningRun:
        moved = task.windows.time_scale < 1 and task.seed == 1
        start = RunScore(n=9, errors=0, ttft_ms_p95=400.0, e2e_s_p95=1.0, max_share=0.9)
        taken = replace(start, ttft_ms_p95=300.0, max_share=0.6) if moved else start
        weights = {"w_rtt": 0.5, "w_queue": 5.0 if moved else 0.1}
        return TuningRun(whole=start, tail=taken, weights=weights, accepted=int(moved))

    experiment = tuner(range(2))
    tasks = [cast(TuningTask, task) for task in next(experiment)]
    assert {(task.policy, task.fleet, task.windows.shapes) for task in tasks} == {("gorgo", "8x1xH100", ("herd",))}
    with pytest.raises(StopIteration) as stopped:
        experiment.send({task: run(task) for task in tasks})
    steady, _, ttft, share = stopped.value.value
    assert (steady.value, steady.note) == (1.0, "moved in 0 of 2: w_rtt 0.5, w_queue 0.1; w_rtt 0.5, w_queue 0.1")
    assert ttft.value == pytest.approx(0.75**0.5)
    assert ttft.note == "moved in 1 of 2: w_rtt 0.5, w_queue 0.1; w_rtt 0.5, w_queue 5"
    assert share.note == f"largest share {fmean((0.9, 0.6)):.2f} after 0.90"
