from __future__ import annotations

import asyncio
import io
from dataclasses import astuple
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from gorgo.lab.replay.options import ReplayOptions
from gorgo.lab.replay.run import ReplayProgress
from gorgo.lab.replay.summary import LogHistogram, ReplayRecord, Tally


def record(**changes: object) -> ReplayRecord:
    values = {"id": "r", "scheduled_s": 1.0, "sent_s": 1.25, "input_tokens": 100, "ttft_ms": 10.0, "e2e_s": 1.0}
    return ReplayRecord(**{**values, **changes})  # type: ignore[arg-type]


@given(st.lists(st.floats(1e-5, 1e3), min_size=1, max_size=200), st.sampled_from([0.5, 0.95, 0.99]))
def test_a_quantile_of_the_histogram_is_right_within_one_percent(values: list[float], share: float) -> None:
    histogram = LogHistogram()
    histogram.add(tuple(values))
    expected = np.quantile(values, share, method="inverted_cdf")
    assert histogram.quantile(share) == pytest.approx(expected, rel=0.0101)


def test_no_value_has_no_quantile() -> None:
    assert LogHistogram().quantile(0.5) is None
    assert LogHistogram().spread().mean is None


def test_a_gap_of_nothing_or_of_hours_is_still_counted() -> None:
    histogram = LogHistogram()
    histogram.add((0.0, 1e9))
    assert histogram.count == 2


def test_a_row_sums_up_good_requests_and_the_slip_of_all() -> None:
    tally = Tally()
    for one in (
        record(
            replica="x", cached_tokens=50, estimated_cached_tokens=40.0, predicted_ttft_ms=14.0, gaps_s=(0.01, 0.03)
        ),
        record(replica="x", input_tokens=300, cached_tokens=250, ttft_ms=30.0, e2e_s=3.0, gaps_s=(0.02,)),
        record(replica="y", estimated_cached_tokens=60.0, ttft_ms=20.0, e2e_s=2.0, predicted_ttft_ms=18.0, policy="p"),
        # A stream that broke late: it has all that a good one has, and counts in `n`, `errors` and the slip alone.
        record(
            error="disconnected: late",
            replica="y",
            sent_s=3.25,
            cached_tokens=100,
            estimated_cached_tokens=100.0,
            ttft_ms=9000.0,
            e2e_s=90.0,
            predicted_ttft_ms=1.0,
            gaps_s=(5.0,),
            policy="q",
        ),
    ):
        tally.add(one)
    row = tally.row(ReplayOptions(trace=Path("folder/t.jsonl"), time_scale=2.0))
    assert (row.trace, row.time_scale, row.policy, row.source) == ("t.jsonl", 2.0, "p", "live")
    assert (row.n, row.errors, dict(row.failures)) == (4, 1, {"connection broken": 1})
    # Of 10, 20 and 30 ms and of 1, 2 and 3 s; quantiles lie between neighbours, p95 at nine tenths of the last step.
    assert astuple(row.ttft_ms) == pytest.approx((20.0, 20.0, 29.0, 29.8))
    assert astuple(row.e2e_s) == pytest.approx((2.0, 2.0, 2.9, 2.98))
    assert row.itl_ms.mean == pytest.approx(20.0)
    assert astuple(row.itl_ms)[1:] == pytest.approx((20.0, 30.0, 30.0), rel=0.01)
    assert (row.cache_hit, row.cache_hit_estimated) == (300 / 400, 100 / 200)
    assert row.share == {"x": 2 / 3, "y": 1 / 3}
    # Predictions are off by 4 and 2 ms.
    assert astuple(row.prediction_error_ms)[:3] == pytest.approx((3.0, 3.0, 3.9))
    # Three were sent a quarter of a second late and the failed one 2.25 s: p95 is 0.85 of the way between.
    assert row.slip_ms_p95 == pytest.approx(1950.0)
    assert tally.ttft_s_p95() == pytest.approx(0.030, rel=0.01)


def test_the_policy_of_a_row_is_the_given_one_else_the_most_common() -> None:
    tally = Tally()
    for policy in ("a", "b", "b"):
        tally.add(record(policy=policy))
    assert tally.row(ReplayOptions(trace=Path("t"))).policy == "b"
    assert tally.row(ReplayOptions(trace=Path("t"), policy="c")).policy == "c"


def test_slip_is_never_negative() -> None:
    assert record(sent_s=0.5).slip_s == 0.0
    assert record().slip_s == 0.25


# run


@pytest.mark.parametrize("terminal", [True, False])
async def test_progress_ends_with_what_was_done(terminal: bool) -> None:
    out, tally = io.StringIO(), Tally()
    progress = ReplayProgress(tally, 2, "gorgo", Console(file=out, force_terminal=terminal, width=160))
    async with progress.displayed():
        await asyncio.sleep(0)
        tally.add(ReplayRecord(id="r", scheduled_s=0, sent_s=0, input_tokens=1, ttft_ms=100.0, e2e_s=1.0))
        tally.add(ReplayRecord(id="r", scheduled_s=0, sent_s=0, input_tokens=1, error="timeout: x"))
    said = out.getvalue()
    assert "gorgo" in said
    assert "2/2" in said
    assert "0 in flight, 1 errors, TTFT p95 100 ms" in said


async def test_without_a_first_token_there_is_no_p95() -> None:
    assert ReplayProgress(Tally(), 2, "x").status() == "0 in flight, 0 errors, TTFT p95 -"
