from __future__ import annotations

from math import ceil, isnan

import numpy as np
import pytest

from gorgo.sim.gaps import DecodeLog, GapHistogram, p95_s


def test_pooled_quantiles_are_those_of_the_gaps_one_by_one_within_a_hundredth() -> None:
    rng = np.random.default_rng(0)
    gaps, times = rng.lognormal(-4.5, 1.0, 500), rng.integers(1, 50, 500)
    pooled = GapHistogram()
    pooled.add(list(zip(gaps.tolist(), times.tolist(), strict=True)))
    each = np.repeat(gaps, times)
    assert pooled.count == len(each)
    assert pooled.mean_s == pytest.approx(each.mean())
    for share in (0.01, 0.5, 0.95, 0.99):
        assert pooled.quantile_s(share) == pytest.approx(np.quantile(each, share, method="inverted_cdf"), rel=0.011)


def test_without_a_gap_nothing_is_known() -> None:
    assert isnan(GapHistogram().mean_s)
    assert isnan(GapHistogram().quantile_s(0.5))
    assert p95_s([]) is None


def test_gaps_out_of_range_are_counted_at_its_ends() -> None:
    pooled = GapHistogram()
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
    log = DecodeLog()
    log.add(0.0, 1.0, 10)
    mark = log.mark()
    log.add(2.0, 2.3, 3)
    log.add(2.3, 2.5, 1)
    log.add(3.0, 3.4, 2)
    pairs = log.gaps(mark, first_token_s=2.0)
    assert [(round(gap_s, 6), times) for gap_s, times in pairs] == [(0.1, 3), (0.2, 1), (0.7, 1), (0.2, 1)]


def test_a_long_log_forgets_what_nobody_asks_for_any_more() -> None:
    log = DecodeLog()
    marks = []
    for number in range(10_000):
        marks.append(log.mark())
        log.add(float(number), number + 1.0, 4)
        if log.long:
            log.forget(marks[-100:])
    assert len(log._runs) < 8200
    assert log.gaps(marks[-100], first_token_s=9900.0) == [(0.25, 4)] * 100
