"""What recent requests say, against plain readings of the same samples."""

from __future__ import annotations

from math import floor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gorgo.live.admin.page.recent_stats import BINS, RECENT_S, RecentStats, quantile, recent_stats, ttft_series
from tests.live.admin.page.made import NOW, sample

FLOATS = st.floats(min_value=0.0, max_value=1e6)


@settings(max_examples=50)
@given(st.lists(FLOATS, min_size=1), st.floats(min_value=0.0, max_value=1.0))
def test_quantile_is_numpy_s(values: list[float], q: float) -> None:
    assert quantile(sorted(values), q) == pytest.approx(float(np.quantile(values, q)), rel=1e-9, abs=1e-6)


def test_nothing_is_unknown_and_not_zero() -> None:
    assert RecentStats.of([]) == RecentStats(0, 0, None, None, None, None, None)


def test_failures_predictions_and_shares_are_of_those_that_tell() -> None:
    figures = RecentStats.of(
        [
            sample(1, ttft_ms=100.0, predicted_ttft_ms=90.0),
            sample(2, ttft_ms=300.0, predicted_ttft_ms=None, cached_tokens=None),
            sample(3, ttft_ms=None, status=502, cached_tokens=80, estimated_cached_tokens=30),
            sample(4, ttft_ms=None, status=499, cached_tokens=None),
        ]
    )
    assert (figures.n, figures.failed) == (4, 1)
    assert (figures.ttft_ms_p50, figures.error_ms_p50) == (200.0, 10.0)
    assert figures.cached_share == pytest.approx((40 + 80) / 200)
    assert figures.estimated_share == pytest.approx((50 + 30) / 200)


def test_recent_is_what_finished_within_the_window() -> None:
    samples = [sample(2, finished_s=NOW - 1.0), sample(1, finished_s=NOW - RECENT_S - 1.0)]
    assert recent_stats(samples, now=NOW) == samples[:1]


@pytest.mark.parametrize(("up_s", "span_s"), [(10.0, 60.0), (61.0, 120.0), (1e6, RECENT_S)])
@settings(max_examples=25)
@given(ages=st.lists(st.tuples(st.floats(min_value=0.0, max_value=400.0), FLOATS), max_size=60))
def test_course_puts_each_sample_into_the_place_of_its_time(
    up_s: float, span_s: float, ages: list[tuple[float, float]]
) -> None:
    bins = ttft_series([sample(finished_s=NOW - age, ttft_ms=ttft) for age, ttft in ages], now=NOW, up_s=up_s)
    length_s = span_s / BINS
    assert [one.start_s for one in bins] == pytest.approx(
        [(floor(NOW / length_s) - k) * length_s for k in range(BINS)][::-1]
    )
    for one in bins:
        place = round(one.start_s / length_s)
        mine = [ttft for age, ttft in ages if floor((NOW - age) / length_s) == place]
        assert one.n == len(mine)
        assert one.ttft_ms_p50 == (pytest.approx(float(np.median(mine)), rel=1e-6, abs=1e-6) if mine else None)


def test_course_stands_still_while_time_passes_within_a_place() -> None:
    samples = [sample(finished_s=NOW - 20.0)]
    assert ttft_series(samples, now=NOW, up_s=1e6) == ttft_series(samples, now=NOW + 4.9, up_s=1e6)
    assert ttft_series(samples, now=NOW, up_s=1e6) != ttft_series(samples, now=NOW + 5.0, up_s=1e6)


@pytest.mark.parametrize(("age_s", "recent"), [(0.0, True), (300.0, True), (300.001, False)])
def test_recent_is_five_minutes(age_s: float, recent: bool) -> None:
    found = recent_stats([sample(finished_s=1000.0 - age_s)], now=1000.0)
    assert len(found) == recent


@pytest.mark.parametrize(("status", "failed"), [(200, 0), (499, 0), (500, 1), (503, 1)])
def test_a_request_failed_that_ended_with_an_error_of_the_server(status: int, failed: int) -> None:
    assert RecentStats.of([sample(status=status)]).failed == failed


@pytest.mark.parametrize(
    ("up_s", "length_s"), [(0.0, 1.0), (60.0, 1.0), (60.1, 2.0), (120.0, 2.0), (120.1, 5.0), (300.0, 5.0), (1e9, 5.0)]
)
def test_places_are_a_sixtieth_of_one_two_or_five_minutes(up_s: float, length_s: float) -> None:
    bins = ttft_series([], now=NOW, up_s=up_s)
    assert ({one.length_s for one in bins}, len(bins)) == ({length_s}, 60)


def test_a_place_has_its_quantiles_and_a_request_without_a_first_token_none() -> None:
    times = [100.0, 200.0, 300.0, 400.0, 500.0]
    samples = [sample(finished_s=1000.0, ttft_ms=time) for time in (*times, None)]
    *_, last = ttft_series(samples, now=1000.0, up_s=1e6)
    assert (last.start_s, last.n, last.ttft_ms_p50) == (1000.0, 5, 300.0)
    assert last.ttft_ms_p95 == pytest.approx(480.0)
