"""Capacity, and what is served well beyond it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gorgo.apps.simulate import SimJob, run_once
from gorgo.apps.simulate.goodput import goodput_of
from gorgo.apps.simulate.overload import at_once, capacity_scale, held, overload_rows
from gorgo.core.limits import RouterLimits
from gorgo.errors import TraceError
from gorgo.sim.feed import SimRequest
from gorgo.sim.records import SimRecord
from tests.sim.fleets import three_regions


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
            head=number,
        )
        for number, at in enumerate(arrivals)
    ]


def job(**options: object) -> SimJob:
    given: dict[str, object] = {"trace": "made", "policy": "gorgo-ms", "fleet": three_regions(), "feed": feed()}
    return SimJob(**given | options)  # type: ignore[arg-type]


def record(ttft_ms: float | None, e2e_s: float | None, **more: object) -> SimRecord:
    made = SimRecord(id="r", scheduled_s=0.0, sent_s=0.0, input_tokens=1, ttft_ms=ttft_ms, e2e_s=e2e_s)
    for name, value in more.items():
        setattr(made, name, value)
    return made


def test_served_well_is_both_in_time_and_whole() -> None:
    records = [
        record(1999.0, 9.9, held_s=0.5),
        record(2001.0, 9.9),
        record(100.0, 10.1, hedged=True),
        record(None, 0.1, error="deadline_unreachable"),
        record(100.0, 1.0, error="disconnected", scheduled_s=10.0),
    ]
    found = goodput_of(records)
    assert found is not None
    assert (found.good, found.per_s, found.rejected, found.held, found.hedged) == (0.2, 0.1, 0.4, 0.2, 0.2)


def test_nothing_offered_is_no_goodput() -> None:
    assert goodput_of([]) is None


def test_capacity_is_where_the_share_falls_below_its_bound() -> None:
    capacity = capacity_scale(job())

    def good(time_scale: float) -> float:
        run = run_once(replace(job(limits=at_once(RouterLimits())), time_scale=time_scale))
        assert run.goodput is not None
        return run.goodput.good

    assert good(capacity) >= 0.95 > good(capacity / 1.1)


def test_a_trace_that_no_fleet_serves_in_time_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(TraceError, match="--max-input"):
        capacity_scale(job(feed=feed(40, prompt_tokens=60_000)))


def test_beyond_capacity_holding_serves_more_in_time_and_as_much_at_three_times_the_load() -> None:
    asked = job(slo_ttft_ms=2000.0)
    rows = overload_rows(asked, capacity=capacity_scale(job()), loads=(0.7, 1.3, 3.0), open_in_flight=20, n_jobs=1)
    found = {(row.load, row.held): row.goodput for row in rows}
    # All prompts are alike here, so 1 / 1.3 of them is what the engines can do, and the last queue on top.
    assert found[1.3, True].good >= 1 / 1.3 > found[1.3, False].good + 0.1
    assert found[3.0, True].per_s >= 0.9 * found[1.3, True].per_s
    assert abs(found[0.7, True].good - found[0.7, False].good) <= 0.01
    assert found[3.0, True].rejected > 0.0 == found[0.7, False].rejected


def test_sent_at_once_nothing_waits_and_held_takes_the_bound_given() -> None:
    limits = held(RouterLimits(), open_in_flight=7)
    assert (limits.overload.hold, limits.overload.open_in_flight) == (True, 7)
    assert held(limits).overload.open_in_flight == 7
    assert held(limits, slo_e2e_ms=9000.0).overload.slo_e2e_s == 9.0
    assert (at_once(limits).overload.hold, at_once(limits).hedging.share) == (False, 0.0)
