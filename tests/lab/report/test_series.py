"""The points of plots, and the files of them: shares, groups and ratios worked out by hand."""

from __future__ import annotations

import csv
import io
from math import exp, log

import numpy as np
import pytest

from gorgo.lab.report.plots import prompt_plot, ratio_plot, region_plot, slo_plot, tail_plot
from gorgo.lab.report.runs import (
    E2E_P95,
    TTFT_P95,
    Cell,
    Comparison,
    Requests,
    Run,
    best_baseline,
    mean,
    mean_quantiles,
    mean_share,
    ratio,
)
from gorgo.lab.report.series import (
    PlotSeries,
    load_series,
    prompt_series,
    ratio_series,
    region_series,
    slo_series,
    tail_series,
)
from tests.lab.report.builders import comparison, p95_cell, row, saved_cell


def table(series: PlotSeries) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(series.csv())))


def cell(*runs: Requests, policy: str = "gorgo") -> Cell:
    return Cell(policy, policy, tuple(Run(row(policy, seed=seed), one) for seed, one in enumerate(runs)))


def grouped(policy: str = "gorgo") -> Comparison:
    """A run of 20 fast requests with short prompts in eu, 40 slow ones with long prompts in us, and 5 elsewhere."""
    ttft_ms = np.concatenate([np.full(20, 100.0), np.linspace(1000, 2000, 40), np.full(5, 7.0)])
    tokens = np.concatenate([np.full(20, 512.0), np.full(40, 513.0), np.full(5, 40_000.0)])
    region = np.array(["eu"] * 20 + ["us"] * 40 + [""] * 5)
    return comparison({2.0: [cell(Requests(65, ttft_ms, {}, tokens, region), policy=policy)]})


def test_failed_requests_are_not_within_an_slo() -> None:
    first = Requests(10, np.array([499.0, 500.0, 501.0, 3000.0]), {"timeout": 6})
    second = Requests(2, np.array([1.0, 2.0]), {})
    found = comparison({2.0: [cell(first, second)], 1.0: [cell(Requests(4, np.empty(0), {"timeout": 4}))]})
    series = slo_series(found, (500.0, 2000.0))
    assert table(series)[:2] == [
        {"slo": "TTFT within 500 ms", "policy": "gorgo", "load": "0.5", "share": "0.6", "lowest": "0.2",
         "highest": "1", "runs": "2"},
        {"slo": "TTFT within 500 ms", "policy": "gorgo", "load": "1", "share": "0", "lowest": "0", "highest": "0",
         "runs": "1"},
    ]  # fmt: skip
    assert [float(one["share"]) for one in table(series)[2:]] == [0.65, 0.0]
    figure = slo_plot(found, series)
    assert [panel.get_ylim() for panel in figure.axes] == [(0.0, 1.02)] * 2


def test_ttft_by_region_has_p50_and_p95_of_groups_large_enough() -> None:
    series = region_series(grouped(), [2.0])
    assert table(series) == [
        {"load": "0.5", "policy": "gorgo", "region": "eu", "p50_ttft_ms": "100", "p95_ttft_ms": "100", "runs": "1"},
        {"load": "0.5", "policy": "gorgo", "region": "us", "p50_ttft_ms": "1500", "p95_ttft_ms": "1950", "runs": "1"},
    ]
    (panel,) = region_plot(grouped(), series).axes
    assert [label.get_text() for label in panel.get_xticklabels()] == ["eu", "us"]


def test_ttft_by_prompt_length_has_classes_with_their_bounds() -> None:
    series = prompt_series(grouped(), [2.0])
    assert [(one["prompt_tokens"], one["p95_ttft_ms"]) for one in table(series)] == [
        ("to 512", "100"),
        ("to 2,048", "1950"),
    ]
    (panel,) = prompt_plot(grouped(), series).axes
    assert [label.get_text() for label in panel.get_xticklabels()] == ["to 512", "to 2,048"]
    assert prompt_series(comparison({1.0: [saved_cell("gorgo", [1.0] * 50)]}), [1.0]).points == ()


def test_a_ratio_names_its_baseline_and_has_its_interval() -> None:
    cells = [p95_cell("gorgo", 100.0, 350.0), p95_cell("prefix-cache", 200.0, 200.0), p95_cell("random", 50.0)]
    found = comparison({2.0: cells, 1.0: [p95_cell("gorgo", 100.0)]})
    series = ratio_series(found, (TTFT_P95, E2E_P95))
    assert [(one["measure"], one["policy"], one["baseline"], one["runs"]) for one in table(series)] == [
        (f"p95 {name} / best baseline", policy, "prefix-cache", runs)
        for name in ("TTFT", "E2E")
        for policy, runs in (("gorgo", "2"), ("random", "1"))
    ]
    gorgo, random = table(series)[:2]
    assert float(gorgo["ratio"]) == pytest.approx(0.9354, abs=1e-4)
    assert float(gorgo["interval_high"]) == pytest.approx(2675.89)
    assert (random["ratio"], random["interval_low"], random["interval_high"]) == ("0.25", "", "")
    figure = ratio_plot(found, series)
    assert [panel.get_yscale() for panel in figure.axes] == ["log"] * 2
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["0.5"]
    low, high = figure.axes[0].get_ylim()
    assert 0.1 < low < 0.25  # the least ratio
    assert 1.25 < high < 3  # not the interval of two runs, up to 2,676


def test_the_p95_of_the_tail_is_the_p95_of_the_load_plot() -> None:
    runs = [np.random.default_rng(seed).lognormal(6, 1, 300) for seed in range(3)]
    rows = [row(each_ms=values.tolist(), seed=seed) for seed, values in enumerate(runs)]
    one = Cell("gorgo", "gorgo", tuple(Run(r, Requests(300, v, {})) for r, v in zip(rows, runs, strict=True)))
    found = comparison({1.0: [one]})
    (point,) = load_series(found, (TTFT_P95,)).points
    (at_5_percent,) = (tail.x for tail in tail_series(found, [1.0]).points if tail.value == 0.05)
    assert at_5_percent == pytest.approx(point.value)
    figure = tail_plot(found, tail_series(found, [1.0]))
    figure.draw_without_rendering()
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["100%", "50%", "20%", "10%", "5%", "2%", "1%", "0.5%", "0.2%", "0.1%"]


# runs


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
