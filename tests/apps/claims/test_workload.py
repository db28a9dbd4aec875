"""From a workload to its run."""

from __future__ import annotations

from typing import Any

import pytest

from gorgo.apps.claims import Conditions, Workload
from gorgo.apps.claims.workload import PolicyTask
from gorgo.apps.simulate import SimJob
from gorgo.apps.traces import TraceFilters
from gorgo.core.limits import RouterLimits
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
    ],
)
def test_a_label_has_the_load_and_what_happens(workload: Any, label: str) -> None:
    assert workload.label == label
