"""From a workload to its run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gorgo.apps.claims import Conditions, RatioTarget, Workload
from gorgo.apps.claims.workload import LEARNED, PolicyTask
from gorgo.apps.simulate import SimJob
from gorgo.apps.traces import TraceFilters
from gorgo.core.limits import RouterLimits
from gorgo.sim.named_fleets import find_fleet
from tests.sim.fleets import three_regions

WINDOW = Workload(name="windows", traces=("one", "two"), filters=TraceFilters(max_input=9, limit=50), time_scale=1.25)


def test_a_job_has_all_of_its_setting_and_its_bench() -> None:
    conditions = Conditions(
        fleet=three_regions(), limits=RouterLimits(max_attempts=2), probe_interval_s=7.0, scrape_interval_s=11.0
    )
    assert conditions.job(PolicyTask(WINDOW.under("bursts"), "random", 5)) == SimJob(
        trace="two",
        policy="random",
        fleet=three_regions(),
        filters=TraceFilters(max_input=9, limit=50),
        time_scale=1.25,
        seed=5,
        scenario="bursts",
        limits=RouterLimits(max_attempts=2),
        probe_interval_s=7.0,
        scrape_interval_s=11.0,
    )


def test_learned_weights_are_those_of_the_published_policy() -> None:
    conditions = Conditions(fleet=three_regions())
    job = conditions.job(PolicyTask(WINDOW, LEARNED, 0))
    assert (job.policy, job.weights) == ("gorgo", {"w_rtt": 0.276, "w_queue": 0.5})
    assert conditions.job(PolicyTask(WINDOW, "gorgo", 0)).weights is None


@pytest.mark.parametrize(
    ("own", "first", "limit"), [(50, None, 50), (50, 20, 20), (50, 80, 50), (None, 20, 20), (None, None, None)]
)
def test_the_smaller_bound_of_requests_counts(own: int | None, first: int | None, limit: int | None) -> None:
    workload = Workload(name="w", traces=("t",), filters=TraceFilters(limit=own, spread_s=3.0))
    job = Conditions(fleet=three_regions(), first_requests=first).job(PolicyTask(workload, "random", 0))
    assert job.filters == TraceFilters(limit=limit, spread_s=3.0)


@pytest.mark.parametrize(
    ("workload", "label"),
    [
        (WINDOW, "windows, load 0.8"),
        (WINDOW.at(2.0), "windows, load 0.5"),
        (WINDOW.under("killed"), "windows, load 0.8, killed"),
        (WINDOW.on("h100").under("killed"), "windows, load 0.8, h100, killed"),
    ],
)
def test_a_label_has_the_load_and_what_happens(workload: Any, label: str) -> None:
    assert workload.label == label


def test_a_workload_has_its_own_fleet_and_block_size() -> None:
    workload = replace(WINDOW, fleet="h100", block_tokens=16)
    job = Conditions(fleet=three_regions()).job(PolicyTask(workload, "random", 0))
    assert (job.fleet, job.block_tokens) == (find_fleet("h100"), 16)
    assert Conditions(fleet=three_regions()).job(PolicyTask(WINDOW, "random", 0)).block_tokens is None


def test_a_workload_with_few_seeds_takes_the_first_of_the_check() -> None:
    few = replace(WINDOW, seeds=2)
    target = RatioTarget(
        group="g", policy="gorgo-ms", workloads=(few,), others=("gorgo",), figure="p95 TTFT", at_most=1.0
    )
    assert [(task.policy, task.seed) for task in target.tasks(range(3, 9))] == [
        ("gorgo-ms", 3),
        ("gorgo-ms", 4),
        ("gorgo", 3),
        ("gorgo", 4),
    ]
