from __future__ import annotations

from math import ceil, isnan

import numpy as np
import pytest

from gorgo.lab.sim.engine.itl import DecodeTimeline, ItlHistogram, p95_s


def test_pooled_quantiles_are_those_of_the_gaps_one_by_one_within_a_hundredth() -> None:
    rng = np.random.default_rng(0)
    gaps, times = rng.lognormal(-4.5, 1.0, 500), rng.integers(1, 50, 500)
    pooled = ItlHistogram()
    pooled.add(list(zip(gaps.tolist(), times.tolist(), strict=True)))
    each = np.repeat(gaps, times)
    assert pooled.count == len(each)
    assert pooled.mean_s == pytest.approx(each.mean())
    for share in (0.01, 0.5, 0.95, 0.99):
        assert pooled.quantile_s(share) == pytest.approx(np.quantile(each, share, method="inverted_cdf"), rel=0.011)


def test_without_a_gap_nothing_is_known() -> None:
    assert isnan(ItlHistogram().mean_s)
    assert isnan(ItlHistogram().quantile_s(0.5))
    assert p95_s([]) is None


def test_gaps_out_of_range_are_counted_at_its_ends() -> None:
    pooled = ItlHistogram()
    pooled.add([(1e-9, 1), (1e6, 1)])
    assert pooled.count == 2
    assert pooled.quantile_s(0.5) < 2e-6
    assert pooled.quantile_s(1.0) > 9e3


def test_p95_is_the_proxy_s() -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        gaps, times = rng.random(8), rng.integers(1, 12, 8)
        each = sorted(np.repeat(gaps, times).tolist())
        pairs = zip(gaps.tolist(), times.tolist(), strict=True)
        assert p95_s(pairs) == each[ceil(0.95 * len(each)) - 1]


@pytest.mark.parametrize(("gaps", "place"), [(1, 1), (19, 19), (20, 19), (21, 20), (40, 38), (100, 95)])
def test_p95_is_the_least_gap_that_19_in_20_do_not_exceed(gaps: int, place: int) -> None:
    assert p95_s((float(number), 1) for number in range(1, gaps + 1)) == place


def test_a_stall_is_in_the_first_gap_after_it() -> None:
    log = DecodeTimeline()
    log.add(0.0, 1.0, 10)
    mark = log.mark()
    log.add(2.0, 2.3, 3)
    log.add(2.3, 2.5, 1)
    log.add(3.0, 3.4, 2)
    pairs = log.gaps(mark, first_token_s=2.0)
    assert [(round(gap_s, 6), times) for gap_s, times in pairs] == [(0.1, 3), (0.2, 1), (0.7, 1), (0.2, 1)]


def test_a_wait_before_the_first_run_is_in_the_first_gap_and_rounding_is_none() -> None:
    log = DecodeTimeline()
    log.add(1.0 + 1e-12, 1.2, 2)
    assert [(round(gap_s, 6), times) for gap_s, times in log.gaps(0, first_token_s=1.0)] == [(0.1, 2)]
    assert [(round(gap_s, 6), times) for gap_s, times in log.gaps(0, first_token_s=0.5)] == [(0.6, 1), (0.1, 1)]


def test_a_log_whose_requests_have_all_ended_is_emptied_and_its_marks_go_on() -> None:
    log = DecodeTimeline()
    for number in range(5):
        log.add(float(number), number + 1.0, 1)
    assert (log.mark(), log.is_long) == (5, False)
    log.forget([])
    assert log.mark() == 5
    log.add(9.0, 9.5, 1)
    assert log.gaps(5, first_token_s=9.0) == [(0.5, 1)]
    log.forget([5, 6])
    assert (log.mark(), log.gaps(5, first_token_s=9.0)) == (6, [(0.5, 1)])


@pytest.mark.parametrize(("runs", "long"), [(8192, False), (8193, True)])
def test_a_log_is_long_beyond_its_bound(runs: int, long: bool) -> None:
    log = DecodeTimeline()
    for _ in range(runs):
        log.add(0.0, 1.0, 1)
    assert log.is_long is long


@pytest.mark.parametrize(
    ("pairs", "p95"),
    [
        ([(1.0, 19), (2.0, 1)], 1.0),
        ([(1.0, 18), (2.0, 2)], 2.0),
        ([(1.0, 95), (2.0, 4), (3.0, 1)], 1.0),
        ([(1.0, 94), (2.0, 5), (3.0, 1)], 2.0),
        ([(5.0, 1)], 5.0),
        ([(1.0, 0)], None),
    ],
)
def test_p95_counts_each_gap_as_often_as_it_occurs(pairs: list[tuple[float, int]], p95: float | None) -> None:
    assert p95_s(pairs) == p95_s(pairs[::-1]) == p95


def test_a_quantile_is_the_middle_of_its_bin_of_one_hundredth() -> None:
    """The bin from 1 us x 1.01 ** 100 on, and all below a microsecond in the first one."""
    pooled = ItlHistogram()
    pooled.add([(1e-6 * 1.01**100.5, 3), (5e-7, 1)])
    assert (pooled.quantile_s(0.5), pooled.quantile_s(0.25)) == pytest.approx((1e-6 * 1.01**100.5, 1e-6 * 1.01**0.5))
    assert pooled.quantile_s(0.26) == pytest.approx(1e-6 * 1.01**100.5)


def test_a_long_log_forgets_what_nobody_asks_for_any_more() -> None:
    log = DecodeTimeline()
    marks = []
    for number in range(10_000):
        marks.append(log.mark())
        log.add(float(number), number + 1.0, 4)
        if log.is_long:
            log.forget(marks[-100:])
    assert len(log._runs) < 8200
    assert log.gaps(marks[-100], first_token_s=9900.0) == [(0.25, 4)] * 100
