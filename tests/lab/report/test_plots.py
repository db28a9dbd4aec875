"""Plots of latencies show the figures of the runs: points, bars and ticks worked out by hand."""

from __future__ import annotations

import csv
import io
import re
from math import exp, log
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gorgo.lab.report import plots
from gorgo.lab.report.plots import (
    PlotSeries,
    drawn_labels,
    drawn_loads,
    load_plot,
    load_series,
    prompt_plot,
    prompt_series,
    ratio_plot,
    ratio_series,
    region_plot,
    region_series,
    slo_plot,
    slo_series,
    tail_plot,
    tail_series,
    tuning_plot,
)
from gorgo.lab.report.report import tuning_csv
from gorgo.lab.report.runs import (
    E2E_P95,
    TTFT_P95,
    Cell,
    Comparison,
    ReportGeneration,
    Requests,
    Run,
    best_baseline,
    mean,
    mean_quantiles,
    mean_share,
    ratio,
)
from gorgo.lab.report.style import (
    NARROW,
    add_legend,
    line_styles,
    panels,
    set_load_ticks,
    set_log_ticks,
    svg_document,
    svg_element,
)
from tests.lab.report.builders import comparison, p95_cell, row, saved_cell


def points(panel: Axes) -> list[list[tuple[float, float]]]:
    return [[(float(x), float(y)) for x, y in np.asarray(line.get_xydata())] for line in panel.lines]


def titles(axes: list[Axes]) -> list[str]:
    return [panel.get_title(loc="left") or panel.get_title() for panel in axes]


def test_a_curve_is_the_fraction_of_requests_slower_than_a_ttft() -> None:
    slow, fast = saved_cell("gorgo", [400.0, 100.0], [200.0, 200.0]), saved_cell("random", [30.0, 0.0, 10.0])
    loads = {2.0: [slow, p95_cell("nearest", 1.0), saved_cell("floor", [5.0])], 1.0: [fast]}
    series = tail_series(comparison(loads), [2.0, 1.0])
    figure = tail_plot(comparison(loads), series)
    half, whole = figure.axes
    assert titles(figure.axes) == ["load 0.5", "load 1"]
    # The first line of each panel marks 5 %.
    assert [y for _, y in points(half)[0]] == [0.05, 0.05]
    curve = {y: x for x, y in points(half)[1]}
    # The mean of the two runs' quantiles, as in the tables: medians 250 and 200, minima 100 and 200.
    assert [curve[0.5], curve[1.0]] == pytest.approx([225.0, 150.0])
    assert min(curve) == 0.5  # one of the two requests of a run
    assert points(half)[2] == [(5.0, 1.0)]
    # A logarithmic axis has no 0: it is drawn at the least positive value.
    assert points(whole)[1][0] == pytest.approx((2.0, 1.0))
    assert [(panel.get_xscale(), panel.get_yscale()) for panel in figure.axes] == [("log", "log")] * 2
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["gorgo", "random", "floor"]


def test_loads_beyond_the_panels_are_spread_evenly_with_both_ends() -> None:
    few, many = (comparison({float(n): [p95_cell("gorgo", 1.0)] for n in range(count, 0, -1)}) for count in (4, 10))
    assert drawn_loads(few) == [4.0, 3.0, 2.0, 1.0]
    assert drawn_loads(many) == [10.0, 7.0, 4.0, 1.0]


def test_loads_and_policies_beyond_the_bounds_are_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "MAX_PANELS", 2)
    monkeypatch.setattr(plots, "MAX_CURVES", 3)
    found = comparison({n: [saved_cell(f"p{m}", [1.0]) for m in range(4)] for n in (3.0, 2.0, 1.0)})
    figure = tail_plot(found, tail_series(found, drawn_loads(found)))
    assert titles(figure.axes) == ["load 0.333", "load 1"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["p0", "p1", "p2"]


def test_references_are_drawn_when_policies_are_cut() -> None:
    names = [f"p{number:02}" for number in range(15)]
    cells = [p95_cell(name, 1.0) for name in (*names, "oracle", "floor")]
    assert drawn_labels(comparison({1.0: cells})) == [*names[:14], "oracle", "floor"]


def test_a_tail_against_the_load_has_means_and_the_range_of_its_seeds() -> None:
    loads = {
        4.0: [p95_cell("gorgo", 100.0, 200.0, 300.0), p95_cell("random", 1000.0), p95_cell("nearest", None)],
        1.0: [p95_cell("gorgo", 500.0, None, 1500.0)],
    }
    found = comparison(loads)
    figure = load_plot(found, load_series(found, (TTFT_P95, E2E_P95)))
    ttft, _ = figure.axes
    assert titles(figure.axes) == ["p95 TTFT, ms (log scale)", "p95 E2E, s (log scale)"]
    assert (ttft.get_yscale(), ttft.get_xticks().tolist()) == ("log", [0.25, 1.0])
    containers: Any = ttft.containers
    drawn = [
        (line.get_xydata().tolist(), [segment.tolist() for bar in bars for segment in bar.get_segments()])
        for line, _, bars in (container.lines for container in containers)
    ]
    assert drawn == [
        ([[0.25, 200.0], [1.0, 1000.0]], [[[0.25, 100.0], [0.25, 300.0]], [[1.0, 500.0], [1.0, 1500.0]]]),
        ([[0.25, 1000.0]], [[[0.25, 1000.0], [0.25, 1000.0]]]),
    ]


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (1.0, 9999.0, [1, 10, 100, 1000]),
        (1.0, 999.0, [1, 3, 10, 30, 100, 300]),
        (1.0, 30.0, [1, 2, 5, 10, 20]),
        (100.0, 500.0, [100, 200, 300, 400, 500]),
    ],
)
def test_ticks_of_a_logarithmic_axis_are_round_numbers(low: float, high: float, ticks: list[float]) -> None:
    _, (panel,) = panels(1)
    panel.set_xlim(low, high)
    set_log_ticks(panel, "x")
    assert [tick for tick in panel.get_xticks() if low <= tick <= high] == pytest.approx(ticks)
    assert list(panel.get_xticks(minor=True)) == []
    formatted = [panel.xaxis.get_major_formatter()(value) for value in (1000.0, 10.0, 9.5, 0.25)]
    assert formatted == ["1,000", "10", "9.5", "0.25"]


@pytest.mark.parametrize(("low", "high"), [(9.8, 11.2), (103.2, 104.1), (0.9994, 1.0003), (1999.2, 2001.4)])
def test_no_two_ticks_of_a_logarithmic_axis_read_the_same(low: float, high: float) -> None:
    figure, (panel,) = panels(1)
    panel.plot([1, 2], [low, high])
    set_log_ticks(panel, "y")
    figure.draw_without_rendering()
    labels = [label.get_text() for label in panel.get_yticklabels()]
    assert len(labels) >= 3
    assert len(set(labels)) == len(labels)


def test_no_two_ticks_of_a_load_axis_read_the_same_or_overlap() -> None:
    _, (panel,) = panels(1)
    set_load_ticks(panel, [1 / 1.0, 1 / 0.99, 1 / 0.9899, 1 / 0.5, 1 / 0.49, 1 / 4])
    labels = [label.get_text() for label in panel.get_xticklabels()]
    assert labels == ["0.25", "1", "2"]
    set_load_ticks(panel, [1.0])
    assert panel.get_xticks().tolist() == [1.0]


def test_a_narrow_figure_has_its_panels_below_each_other() -> None:
    loads = {n: [saved_cell("gorgo", [10.0 * n, 20.0])] for n in (2.0, 1.0)}
    found = comparison(loads)
    figure = tail_plot(found, tail_series(found, [2.0, 1.0]), NARROW)
    figure.draw_without_rendering()
    first, second = (panel.get_position() for panel in figure.axes)
    assert first.y0 > second.y1
    assert first.x0 == pytest.approx(second.x0)
    assert figure.get_figwidth() < 4.1


def test_the_same_plot_is_the_same_svg_with_ids_of_its_key() -> None:
    def draw() -> Figure:
        figure, (panel,) = panels(1)
        panel.plot([1, 2], marker="o")
        return figure

    first, again, other = (
        svg_element(svg_document(draw, key=key), key=key, title="<p95>") for key in ("c0", "c0", "c1")
    )
    assert first == again
    assert "&lt;p95&gt;</title>" in first
    ids, others = (set(re.findall(r' id="([^"]*)"', text)) for text in (first, other))
    assert len(ids) == 5  # the title, the markers of the line and of ticks on two axes, the clip path
    assert not ids & others


def test_every_policy_has_a_style_and_a_legend_entry_of_its_own() -> None:
    labels = ["oracle", "_hidden", "x" * 50, *(f"p{number}" for number in range(14)), "floor"]
    styles = line_styles(labels, ["oracle", "floor"])
    assert len(set(styles.values())) == len(labels)
    assert [styles[name].colour for name in ("oracle", "floor")] == ["#767676"] * 2
    figure, _ = panels(1)
    add_legend(figure, [styles[label].line(label) for label in labels[:3]])
    shown = [text.get_text() for text in figure.legends[0].get_texts()]
    assert shown == ["oracle", " _hidden", "x" * 43 + "…"]


# The plot of a tuning history: candidates and effective weights, worked out by hand.
def generation(
    number: int, weight: float, objective_ms: float | None, *, accepted: bool, best_ms: float | None = None
) -> ReportGeneration:
    sigma = None if number == 1 else 0.5 / (number + 1)
    return ReportGeneration(number, {"w": weight}, sigma, objective_ms, best_ms, accepted, None)


def test_a_tuning_plot_has_candidates_and_effective_weights() -> None:
    figure = tuning_plot(
        [
            generation(0, 1.0, 100.0, accepted=True, best_ms=100.0),
            generation(1, 3.0, None, accepted=False),
            generation(2, 2.0, 80.0, accepted=True, best_ms=90.0),
            generation(3, 4.0, 200.0, accepted=False, best_ms=90.0),
        ]
    )
    points = [[np.asarray(line.get_xydata()).tolist() for line in panel.lines] for panel in figure.axes]
    # The last accepted weight stays effective up to the last generation.
    weight = [[[0, 1], [2, 2]], [[1, 3], [3, 4]], [[0, 1], [2, 2], [3, 2]]]
    sigma = [[[0, 0.5], [2, 0.5 / 3], [3, 0.125]]]
    objective = [[[0, 100], [2, 80]], [[3, 200]], [[0, 100], [2, 90], [3, 90]]]
    assert points == [weight, sigma, objective]
    accepted, rejected, effective = figure.axes[0].lines
    assert (accepted.get_markerfacecolor(), rejected.get_markerfacecolor()) == (accepted.get_color(), "none")
    assert effective.get_drawstyle() == "steps-post"
    assert [panel.get_yscale() for panel in figure.axes] == ["log"] * 3
    titles = [panel.get_title(loc="left") or panel.get_title() for panel in figure.axes]
    assert titles == ["w", "sigma", "objective: p95 TTFT of the window, ms"]


@pytest.mark.parametrize(("values", "scale"), [([0.0, 1.0], "linear"), ([2.0, 2.0], "linear"), ([1.0, 2.0], "log")])
def test_a_scale_is_logarithmic_for_different_positive_values(values: list[float], scale: str) -> None:
    figure = tuning_plot([generation(number, value, None, accepted=False) for number, value in enumerate(values)])
    assert figure.axes[0].get_yscale() == scale
    assert [len(panel.lines) for panel in figure.axes] == [1, 1, 0]


def test_eight_weights_have_a_panel() -> None:
    weights = {f"w{number}": 1.0 for number in range(9)}
    assert len(tuning_plot([ReportGeneration(0, weights, None, None, None, True, None)]).axes) == 10


def test_the_generations_are_a_file_with_a_column_per_weight() -> None:
    rows = [
        ReportGeneration(7, {"a": 0.5}, 0.25, 1234.5, None, True, "better, by far"),
        generation(8, 2.0, 1.0, accepted=False),
    ]
    assert tuning_csv(rows) == (
        "generation,a,w,sigma,objective_ms,incumbent_objective_ms,decision,reason\n"
        '7,0.5,,0.25,1234.5,,accepted,"better, by far"\n'
        "8,,2,0.0555556,1,,rejected,\n"
    )


# --- The points of plots, and the files of them: shares, groups and ratios worked out by hand.


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
