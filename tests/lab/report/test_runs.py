from __future__ import annotations

from math import exp, log

import numpy as np
import pytest

from gorgo.lab.report.runs import TTFT_P95, best_baseline, mean, mean_quantiles, mean_share, ratio
from tests.lab.report.builders import p95_cell


def test_a_ratio_is_a_geometric_mean_over_seeds_with_student_s_interval() -> None:
    found = ratio(p95_cell("a", 100.0, 110.0, 90.0), p95_cell("b", 200.0, 200.0, 200.0), TTFT_P95)
    logs = np.log([0.5, 0.55, 0.45])
    half = 4.303 * np.std(logs, ddof=1) / np.sqrt(3)  # t at 97.5 % with 2 degrees of freedom
    assert found is not None
    assert found.value == pytest.approx(exp(logs.mean()))
    assert (found.low, found.high) == pytest.approx((exp(logs.mean() - half), exp(logs.mean() + half)))


def test_seeds_that_only_one_side_has_do_not_count() -> None:
    found = ratio(p95_cell("a", 100.0, None, 90.0), p95_cell("b", 200.0, 50.0), TTFT_P95)
    assert found is not None
    assert (found.n, found.value, found.low) == (1, 0.5, None)
    assert ratio(p95_cell("a", None), p95_cell("b", 1.0), TTFT_P95) is None


def test_the_inverse_ratio_is_the_reciprocal() -> None:
    a, b = p95_cell("a", 100.0, 130.0), p95_cell("b", 90.0, 200.0)
    there, back = ratio(a, b, TTFT_P95), ratio(b, a, TTFT_P95)
    assert there is not None
    assert back is not None
    assert log(there.value) == pytest.approx(-log(back.value))


def test_the_best_baseline_is_one_of_the_paper_s_four() -> None:
    figures = {"random": 1.0, "least-load": 30.0, "prefix-cache": 20.0, "least-request": None, "gorgo": 10.0}
    best = best_baseline([p95_cell(policy, value) for policy, value in figures.items()], TTFT_P95)
    assert best is not None
    assert best.label == "prefix-cache"
    assert best_baseline([p95_cell("gorgo", 1.0)], TTFT_P95) is None


def test_unknown_runs_do_not_lower_a_mean() -> None:
    assert mean(p95_cell("a", 100.0, None, 200.0), TTFT_P95) == 150.0
    assert mean(p95_cell("a", None), TTFT_P95) is None
    assert mean_share(p95_cell("a", 1.0, share={})) == {}


def test_a_quantile_of_several_runs_is_the_mean_of_theirs() -> None:
    runs = [np.array([100.0, 300.0]), np.array([]), np.array([500.0])]
    assert mean_quantiles(runs, (0.0, 0.5, 1.0)) == [300.0, 350.0, 400.0]
    assert np.isnan(mean_quantiles([np.array([])], (0.5,))).all()
