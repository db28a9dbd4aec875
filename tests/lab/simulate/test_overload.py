"""Capacity, and what is served well beyond it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import log2
from typing import Any

import numpy as np
import pytest

from gorgo.core.limits import RouterLimits
from gorgo.errors import TraceError
from gorgo.lab.sim.engine.itl import ItlHistogram
from gorgo.lab.sim.records import SimRecord, SimResult
from gorgo.lab.sim.workload import SimRequest
from gorgo.lab.simulate import SimJob, SimulatedRun
from gorgo.lab.simulate.overload import at_once, capacity_scale, overload_rows, with_queue
from gorgo.lab.simulate.rows import simulated_run
from tests.lab.sim.fleets import three_regions


def feed(requests: int = 240, *, prompt_tokens: int = 4000) -> list[SimRequest]:
    """Prompts that nobody has asked before, ten a second."""
    rng = np.random.default_rng(5)
    arrivals = np.cumsum(rng.exponential(0.1, requests))
    return [
        SimRequest(
            index=number,
            arrival_s=float(at),
            prompt_tokens=prompt_tokens,
            output_tokens=20,
            blocks=rng.bytes(8 * (prompt_tokens // 512)),
            prefix_hash=number,
        )
        for number, at in enumerate(arrivals)
    ]


def job(**options: object) -> SimJob:
    given: dict[str, object] = {"trace": "made", "policy": "gorgo-ms", "fleet": three_regions(), "feed": feed()}
    return SimJob(**given | options)  # type: ignore[arg-type]


@dataclass
class FakeRuns:
    """Runs of twenty requests of which one fails, and two at a time scale below `least`; given back in reverse."""

    least: float
    jobs: list[SimJob] = field(default_factory=list)

    def __call__(self, jobs: Sequence[SimJob], **_options: object) -> Iterator[SimulatedRun]:
        self.jobs += jobs
        for one in reversed(jobs):
            failed = 1 if one.time_scale >= self.least else 2
            records = [
                SimRecord(id="r", scheduled_s=n, sent_s=n, input_tokens=1, ttft_ms=2000.0 + (n < failed), e2e_s=10.0)
                for n in range(20)
            ]
            yield simulated_run(one, {}, SimResult(records, ItlHistogram(), ended_s=20.0, events=1))


def bounded(**overload: Any) -> RouterLimits:
    return replace(RouterLimits(), overload=replace(RouterLimits().overload, **overload))


def faked(monkeypatch: pytest.MonkeyPatch, *, least: float) -> FakeRuns:
    runs = FakeRuns(least)
    monkeypatch.setattr("gorgo.lab.simulate.overload.run_many", runs)
    return runs


@pytest.mark.parametrize(
    ("least", "capacity", "tried"),
    [
        # Halves or doubles up to one on either side; then geometric means until two are within 5 %.
        (1.0, 1.0, [0, -1, -0.5, -0.25, -0.125, -0.0625]),
        (0.3, 2**-1.6875, [0, -1, -2, -1.5, -1.75, -1.625, -1.6875]),
        (3.0, 2**1.625, [0, 1, 1, 2, 1.5, 1.75, 1.625, 1.5625]),
        (1 / 63, 2**-5.9375, [0, -1, -2, -3, -4, -5, -6, -5.5, -5.75, -5.875, -5.9375]),
        (64.0, 64.0, [0, 1, 2, 3, 4, 5, 6, 5.5, 5.75, 5.875, 5.9375]),
    ],
)
def test_capacity_is_the_least_time_scale_at_which_95_percent_are_good(
    least: float, capacity: float, tried: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = faked(monkeypatch, least=least)
    assert capacity_scale(job(limits=bounded(queue_enabled=True))) == pytest.approx(capacity)
    assert sorted({log2(one.time_scale) for one in runs.jobs}) == pytest.approx(sorted(set(tried)))
    assert all(one.limits == at_once(RouterLimits()) for one in runs.jobs)


@pytest.mark.parametrize(
    ("least", "advice"), [(64.1, "leave out the longest with --max-input"), (1 / 65, "take more requests")]
)
def test_a_capacity_that_no_time_scale_shows_is_an_error_with_advice(
    least: float, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    faked(monkeypatch, least=least)
    with pytest.raises(TraceError, match=advice):
        capacity_scale(job())


def test_a_trace_without_a_request_has_no_capacity() -> None:
    with pytest.raises(TraceError, match="no requests"):
        capacity_scale(job(feed=()))


def test_rows_are_two_per_load_and_queued_ones_alone_have_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = faked(monkeypatch, least=1.0)
    rows = overload_rows(job(), capacity=2.0, loads=(4.0, 1.0))
    assert [(row.load, row.time_scale, row.queueing) for row in rows] == [
        (4.0, 0.5, False),
        (4.0, 0.5, True),
        (1.0, 2.0, False),
        (1.0, 2.0, True),
    ]
    assert [row.goodput.good for row in rows] == [0.9, 0.9, 0.95, 0.95]
    assert [row.row.time_scale for row in rows] == [0.5, 0.5, 2.0, 2.0]
    assert [one.slo_ttft_ms for one in runs.jobs] == [None, 2000.0] * 2
    assert [one.limits for one in runs.jobs] == [at_once(RouterLimits()), with_queue(RouterLimits())] * 2


def test_the_configured_deadline_and_goal_go_before_those_of_goodput(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = faked(monkeypatch, least=1.0)
    limits = bounded(queue_enabled=True, slo_ttft_s=0.7, slo_e2e_s=9.0)
    overload_rows(job(limits=limits), capacity=2.0, loads=(1.0,))
    assert [one.slo_ttft_ms for one in runs.jobs] == [None, 700.0]
    assert runs.jobs[1].limits == limits
    assert with_queue(RouterLimits()).overload.slo_e2e_s == 10.0


def test_beyond_capacity_holding_serves_more_in_time_and_as_much_at_three_times_the_load() -> None:
    limits = bounded(max_concurrency_per_replica=20)
    rows = overload_rows(job(limits=limits), capacity=capacity_scale(job()), loads=(0.7, 1.3, 3.0), n_jobs=1)
    found = {(row.load, row.queueing): row.goodput for row in rows}
    # All prompts are alike here, so 1 / 1.3 of them is what the engines can do.
    assert found[1.3, True].good >= 0.97 / 1.3 > found[1.3, False].good + 0.1
    assert found[3.0, True].per_s >= 0.9 * found[1.3, True].per_s
    assert abs(found[0.7, True].good - found[0.7, False].good) <= 0.01
    assert found[3.0, True].rejected > 0.0 == found[0.7, False].rejected


def test_at_once_nothing_is_queued_or_hedged_and_with_a_queue_the_configured_bounds_hold() -> None:
    limits = bounded(queue_enabled=False, max_concurrency_per_replica=7)
    assert with_queue(limits) == bounded(queue_enabled=True, max_concurrency_per_replica=7, slo_e2e_s=10.0)
    assert (at_once(limits).overload.queue_enabled, at_once(limits).hedging.budget_ratio) == (False, 0.0)
