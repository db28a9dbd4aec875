"""The plot of a tuning history: candidates and effective weights, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from gorgo.lab.report.plots import tuning_plot
from gorgo.lab.report.report import tuning_csv
from gorgo.lab.report.runs import ReportGeneration


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
