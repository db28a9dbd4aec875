from __future__ import annotations

from dataclasses import replace
from math import exp, log, sqrt

import numpy as np
import pytest

from gorgo.lab.results import ResultRow, Spread
from gorgo.lab.simulate.compare import (
    best_of_rows,
    e2e_s_p95,
    mean_interval,
    mean_row,
    ratio_of,
    ratio_of_rows,
    ttft_ms_p95,
)


def row(policy: str, seed: int, p95: float | None, *, time_scale: float = 1.0, errors: int = 0) -> ResultRow:
    return ResultRow(
        trace="t",
        time_scale=time_scale,
        policy=policy,
        weights=None,
        seed=seed,
        source="simulated",
        n=10,
        errors=errors,
        ttft_ms=Spread(1.0, 1.0, p95, 3.0),
        e2e_s=Spread(),
        itl_ms=Spread(),
        cache_hit=None if policy == "floor" else 0.5,
        cache_hit_estimated=None,
        share={f"r{seed}": 1.0},
        prediction_error_ms=Spread(),
        slip_ms_p95=0.0,
    )


def test_a_ratio_is_the_geometric_mean_and_its_interval_holds_the_truth_19_times_in_20() -> None:
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(400):
        common = rng.lognormal(6.0, 0.4, 10)
        ours = common * 0.9 * rng.lognormal(0.0, 0.03, 10)
        ratio = ratio_of(list(zip(ours.tolist(), common.tolist(), strict=True)))
        assert ratio is not None
        assert ratio.value == pytest.approx(exp(float(np.log(ours / common).mean())))
        assert ratio.low is not None
        assert ratio.high is not None
        held += ratio.low <= 0.9 <= ratio.high
    assert 365 <= held <= 395


def test_one_pair_has_a_ratio_without_an_interval_and_none_has_none() -> None:
    ratio = ratio_of([(1.0, 2.0)])
    assert ratio is not None
    assert (ratio.value, ratio.low, ratio.high, ratio.n) == (0.5, None, None, 1)
    assert ratio_of([]) is None
    assert ratio_of([(0.0, 1.0)]) is ratio_of([(1.0, 0.0)]) is None


@pytest.mark.parametrize(
    ("n", "t"), [(2, 12.706), (3, 4.303), (4, 3.182), (10, 2.262), (30, 2.045), (31, 2.042), (32, 2.042), (200, 2.042)]
)
def test_an_interval_is_student_s_by_the_number_of_pairs(n: int, t: float) -> None:
    """Logarithms of 1 and -1 in turn: their mean is 0, or 1 / n where one is left over."""
    mean = (n % 2) / n
    ratio = ratio_of([(exp((-1) ** turn), 1.0) for turn in range(n)])
    error = sqrt((n - n * mean**2) / (n - 1) / n)
    assert ratio is not None
    assert ratio.low is not None
    assert ratio.high is not None
    assert (log(ratio.value), log(ratio.low), log(ratio.high)) == pytest.approx(
        (mean, mean - t * error, mean + t * error)
    )


def test_rows_are_paired_by_seed_and_load() -> None:
    ours = [row("a", 1, 100.0), row("a", 2, 50.0), row("a", 1, 7.0, time_scale=2.0), row("a", 9, 1.0)]
    theirs = [row("b", 2, 100.0), row("b", 1, 400.0), row("b", 1, 7.0, time_scale=2.0), row("b", 8, 1.0)]
    ratio = ratio_of_rows(ours, theirs, ttft_ms_p95)
    assert ratio is not None
    assert ratio.n == 3
    assert ratio.value == pytest.approx(exp((log(0.25) + log(0.5)) / 3))
    assert ratio_of_rows(ours, theirs, e2e_s_p95) is None


def test_rows_of_unlike_settings_are_not_paired() -> None:
    ours = [replace(row("a", seed, 50.0), setting="without a queue") for seed in (1, 2)]
    unlike = replace(row("b", 1, 400.0), setting="with a queue")
    unknown = row("b", 1, 400.0)
    like = replace(row("b", 2, 100.0), setting="without a queue")
    assert ratio_of_rows(ours, [unlike, unknown], ttft_ms_p95) is None
    ratio = ratio_of_rows(ours, [unlike, unknown, like], ttft_ms_p95)
    assert ratio is not None
    assert ratio.n == 1
    assert ratio.value == pytest.approx(0.5)


def test_a_mean_row_has_means_of_quantiles_and_sums_of_counts() -> None:
    mean = mean_row([row("a", 1, 100.0, errors=1), row("a", 2, 50.0, errors=2), row("a", 3, None)])
    assert (mean.ttft_ms.p95, mean.ttft_ms.p50, mean.e2e_s.p95) == (75.0, 1.0, None)
    assert (mean.n, mean.errors, mean.seed) == (30, 3, 1)
    assert mean.share == pytest.approx({"r1": 1 / 3, "r2": 1 / 3, "r3": 1 / 3})
    assert mean_row([row("a", 1, 5.0)]) == row("a", 1, 5.0)


def test_a_mean_row_has_the_mean_of_each_measure_over_the_rows_that_know_it() -> None:
    one = replace(
        row("a", 1, 10.0),
        e2e_s=Spread(1.0, 2.0, 3.0, 4.0),
        itl_ms=Spread(5.0, 6.0, 7.0, 8.0),
        cache_hit_estimated=0.5,
        prediction_error_ms=Spread(9.0, 10.0, 11.0),
        slip_ms_p95=1.0,
    )
    other = replace(
        row("a", 2, 30.0),
        e2e_s=Spread(3.0, 4.0, 5.0, 6.0),
        itl_ms=Spread(7.0, 8.0, 9.0, 10.0),
        cache_hit=0.75,
        prediction_error_ms=Spread(11.0, 12.0, 13.0),
        slip_ms_p95=None,
    )
    mean = mean_row([one, other])
    assert mean.ttft_ms == Spread(1.0, 1.0, 20.0, 3.0)
    assert mean.e2e_s == Spread(2.0, 3.0, 4.0, 5.0)
    assert mean.itl_ms == Spread(6.0, 7.0, 8.0, 9.0)
    assert mean.prediction_error_ms == Spread(10.0, 11.0, 12.0)
    assert (mean.cache_hit, mean.cache_hit_estimated, mean.slip_ms_p95) == (0.625, 0.5, 1.0)
    # A replica that one row does not name served nothing there.
    assert mean.share == {"r1": 0.5, "r2": 0.5}


def test_the_best_is_the_least_mean_of_those_that_know_it() -> None:
    groups = {"a": [row("a", 1, 9.0), row("a", 2, 2.0)], "b": [row("b", 1, 5.0)], "c": [row("c", 1, None)]}
    assert best_of_rows(groups, ttft_ms_p95) == "b"
    assert best_of_rows({"c": groups["c"]}, ttft_ms_p95) is None
    assert best_of_rows({"a": [replace(groups["a"][0])]}, lambda row: row.ttft_ms.p50) == "a"


def test_the_interval_of_a_mean_is_student_s_and_one_value_has_none() -> None:
    assert mean_interval([3.0]) == (3.0,)
    assert mean_interval([1.0, 2.0, 3.0]) == pytest.approx((2.0, 2.0 - 4.303 / 3**0.5, 2.0 + 4.303 / 3**0.5))
