from __future__ import annotations

from itertools import pairwise
from math import exp, log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.apps.report.latency import apart
from gorgo.apps.report.runs import Cell, Run
from gorgo.apps.report.statistics import TTFT_P95, best_baseline, mean, quantile_points, ratio
from gorgo.apps.results import Spread
from tests.apps.report.made import records, row


def cell(policy: str, *p95_ms: float | None) -> Cell:
    made = records([1.0])
    return Cell(
        policy, policy, tuple(Run(row(made, policy, seed=n, ttft_ms=Spread(p95=v))) for n, v in enumerate(p95_ms))
    )


def test_a_ratio_is_a_geometric_mean_over_seeds_with_student_s_interval() -> None:
    found = ratio(cell("a", 100.0, 110.0, 90.0), cell("b", 200.0, 200.0, 200.0), TTFT_P95)
    logs = np.log([0.5, 0.55, 0.45])
    half = 4.303 * np.std(logs, ddof=1) / np.sqrt(3)  # t at 97.5 % with 2 degrees of freedom
    assert found is not None
    assert found.value == pytest.approx(exp(logs.mean()))
    assert (found.low, found.high) == pytest.approx((exp(logs.mean() - half), exp(logs.mean() + half)))


def test_seeds_that_only_one_side_has_do_not_count() -> None:
    found = ratio(cell("a", 100.0, None, 90.0), cell("b", 200.0, 50.0), TTFT_P95)
    assert found is not None
    assert (found.n, found.value, found.low) == (1, 0.5, None)
    assert ratio(cell("a", None), cell("b", 1.0), TTFT_P95) is None


def test_turning_a_ratio_round_inverts_it() -> None:
    a, b = cell("a", 100.0, 130.0), cell("b", 90.0, 200.0)
    there, back = ratio(a, b, TTFT_P95), ratio(b, a, TTFT_P95)
    assert there is not None
    assert back is not None
    assert log(there.value) == pytest.approx(-log(back.value))


def test_the_best_baseline_is_one_of_the_paper_s_four() -> None:
    cells = [cell("random", 1.0), cell("least-load", 30.0), cell("prefix-cache", 20.0), cell("gorgo", 10.0)]
    best = best_baseline(cells, TTFT_P95)
    assert best is not None
    assert best.label == "prefix-cache"
    assert best_baseline([cell("gorgo", 1.0)], TTFT_P95) is None


def test_unknown_runs_do_not_pull_a_mean_down() -> None:
    assert mean(cell("a", 100.0, None, 200.0), TTFT_P95) == 150.0
    assert mean(cell("a", None), TTFT_P95) is None


@given(st.lists(st.floats(0.001, 1e6), min_size=1, max_size=300))
def test_thinned_points_rise_and_span_the_values(values: list[float]) -> None:
    points, levels = quantile_points(np.array(values))
    assert len(points) == len(levels) <= 160
    assert (points[0], points[-1]) == (min(values), max(values))
    assert np.all(np.diff(points) >= 0)


def test_many_values_are_thinned_to_every_percent_and_finer_in_the_tail() -> None:
    points, levels = quantile_points(np.arange(10_001.0))
    percents = [0.0, 0.005, *(number / 100 for number in range(1, 96))]
    tail = [0.95 + number / 1000 for number in range(1, 51)]
    assert np.unique(levels.round(6)).tolist() == pytest.approx(
        sorted({round(level, 6) for level in (*percents, *tail)})
    )
    assert points.tolist() == pytest.approx([10_000 * level for level in levels])


@pytest.mark.parametrize(("count", "levels"), [(1, 2), (2, 2), (3, 3), (147, 147), (148, 148), (149, 148)])
def test_few_values_are_all_drawn(count: int, levels: int) -> None:
    assert len(quantile_points(np.arange(float(count)))[1]) == levels


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_labels_are_apart_and_in_order(heights: list[float]) -> None:
    placed = apart(sorted(heights), 0.06)
    assert len(placed) == len(heights)
    assert all(b - a >= 0.06 - 1e-5 for a, b in pairwise(placed))
    assert min(placed) >= -1e-6
    assert max(placed) <= 1 + 1e-6
