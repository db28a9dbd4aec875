"""The figures in the plots are those of the runs: points, bars, ticks and labels, worked out by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gorgo.apps.report import routing
from gorgo.apps.report.latency import (
    MAX_CURVES,
    MAX_PANELS,
    against_load,
    apart,
    distributions,
    drawn_labels,
    drawn_loads,
    plain_numbers,
)
from gorgo.apps.report.prediction import (
    prediction_plot,
    prediction_words,
    predictions,
    round_trip_plot,
    round_trip_words,
    round_trips,
)
from gorgo.apps.report.runs import Cell, Comparison, ReportGeneration, Requests, Run
from gorgo.apps.report.statistics import E2E_P95, TTFT_P95
from gorgo.apps.report.style import panels
from gorgo.apps.report.tuning import tuning_plot
from gorgo.apps.results import Spread
from tests.apps.report.made import records, row

NAN = float("nan")


def requests(ttft_ms: Sequence[float], **columns: Any) -> Requests:
    """One request a second."""
    count = len(ttft_ms)
    given: dict[str, Any] = {
        "scheduled_s": np.arange(count, dtype=np.float64),
        "ttft_ms": np.array(ttft_ms),
        "e2e_s": np.array(ttft_ms) / 100,
        "predicted_ttft_ms": np.full(count, NAN),
        "rtt_ms": np.full(count, NAN),
        "replica": np.zeros(count, dtype=np.int32),
        "replicas": ("a",),
        "regions": {},
        "errors": {},
    }
    return Requests(**given | columns)


def cell(label: str, *runs: Run, **figures: Any) -> Cell:
    return Cell(label, label, runs or (Run(row(records([1.0]), label, **figures)),))


def comparison(loads: Mapping[float, Sequence[Cell]]) -> Comparison:
    return Comparison("t", "simulated", {time_scale: tuple(cells) for time_scale, cells in loads.items()})


def kept(label: str, *ttft_ms: Sequence[float]) -> Cell:
    return Cell(label, label, tuple(Run(row(records([1.0]), label), requests(values)) for values in ttft_ms))


def xy(line: Any) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in line.get_xydata()]


def points(panel: Axes) -> list[list[tuple[float, float]]]:
    return [xy(line) for line in panel.lines]


def title(panel: Axes) -> str:
    return panel.get_title(loc="left") or panel.get_title()


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def numbered(count: int, *, yardsticks: int = 0) -> Comparison:
    """One load less for each policy, so that every load and policy is there."""
    cells = [cell(f"p{number:02}") for number in range(count)]
    return comparison({1.0: [*cells, *(cell(name) for name in ("oracle", "floor")[:yardsticks])]})


# -- latency


def test_a_curve_is_the_share_of_requests_that_needed_at_most_so_long() -> None:
    slow, fast = kept("gorgo", [400.0, 100.0], [200.0, NAN]), kept("random", [30.0, 0.0, 10.0])
    floor, unknown = kept("floor", [5.0]), kept("nearest", [NAN])
    figure = distributions(comparison({2.0: [slow, unknown, floor], 1.0: [fast]}), lambda one: one.ttft_ms, "TTFT, ms")
    half, whole = figure.axes
    assert [title(panel) for panel in (half, whole)] == [
        "time_scale 2 (load 0.5)",
        "time_scale 1 (load 1)",
    ]
    # The first line of each panel is drawn at 95 %.
    assert [y for _, y in points(half)[0]] == [0.95, 0.95]
    assert points(half)[1:] == [[(100.0, 0.0), (200.0, 0.5), (400.0, 1.0)], [(5.0, 0.0), (5.0, 1.0)]]
    # A logarithmic axis has no place for 0: it is drawn at the least that has one.
    assert points(whole)[1:] == [[(10.0, 0.0), (10.0, 0.5), (30.0, 1.0)]]
    assert half.lines[1].get_zorder() > half.lines[2].get_zorder()
    for panel in (half, whole):
        assert (panel.get_xscale(), panel.get_xlabel()) == ("log", "TTFT, ms")
        assert panel.get_ylim() == (0.0, 1.005)
        assert panel.get_yticks().tolist() == [0.0, 0.25, 0.5, 0.75, 0.95]
        assert [panel.yaxis.get_major_formatter()(share) for share in (0.25, 0.95)] == ["25%", "95%"]
    assert legend(figure) == ["gorgo", "random", "floor"]


def test_loads_beyond_the_panels_are_spread_evenly_with_both_ends() -> None:
    few, many = (comparison({float(n): [cell("gorgo")] for n in range(count, 0, -1)}) for count in (8, 15))
    assert drawn_loads(few) == [8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]
    assert drawn_loads(many) == [15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0]
    assert len(drawn_loads(many)) == MAX_PANELS


def test_yardsticks_are_drawn_before_policies_are_cut() -> None:
    assert drawn_labels(numbered(14, yardsticks=2)) == [f"p{number:02}" for number in range(14)] + ["oracle", "floor"]
    assert drawn_labels(numbered(15, yardsticks=2)) == [f"p{number:02}" for number in range(14)] + ["oracle", "floor"]
    assert len(drawn_labels(numbered(MAX_CURVES + 1))) == MAX_CURVES


def test_a_tail_against_the_load_has_means_and_the_range_of_its_seeds() -> None:
    def runs(label: str, *p95_ms: float | None) -> Cell:
        return Cell(
            label,
            label,
            tuple(
                Run(row(records([1.0]), label, ttft_ms=Spread(p95=value), e2e_s=Spread(p95=value))) for value in p95_ms
            ),
        )

    figure = against_load(
        comparison(
            {
                4.0: [runs("gorgo", 100.0, 200.0, 300.0), runs("random", 1000.0), runs("nearest", None)],
                1.0: [runs("gorgo", 500.0, None, 1500.0)],
            }
        ),
        (TTFT_P95, E2E_P95),
    )
    ttft, e2e = figure.axes
    assert [title(panel) for panel in (ttft, e2e)] == ["p95 TTFT, ms", "p95 E2E, s"]
    assert ttft.get_yscale() == "log"
    assert ttft.get_xticks().tolist() == [0.25, 1.0]
    assert [ttft.xaxis.get_major_formatter()(load) for load in (0.25, 1.0)] == ["0.25", "1"]
    ours, random = (_error_bars(container) for container in ttft.containers)
    assert ours == (
        [(0.25, 200.0), (1.0, 1000.0)],
        # Bars reach from the lowest seed to the highest.
        [[[0.25, 100.0], [0.25, 300.0]], [[1.0, 500.0], [1.0, 1500.0]]],
    )
    assert random == ([(0.25, 1000.0)], [])
    # Names stand at the right end, level with the last point, and are pushed apart where they would overlap.
    low, high = np.log10(ttft.get_ylim())
    level = (3.0 - low) / (high - low)
    assert [text.get_text() for text in ttft.texts] == ["gorgo", "random"]
    texts: Any = ttft.texts
    assert [text.xyann for text in texts] == [
        (1.03, pytest.approx(level - 0.031)),
        (1.03, pytest.approx(level + 0.031)),
    ]
    assert [text.xy for text in texts] == [(1.0, 1000.0), (1.0, 1000.0)]


def _error_bars(container: Any) -> tuple[list[tuple[float, float]], list[Any]]:
    """The points of a line, and the ends of their bars."""
    line, _, bars = container.lines
    return xy(line), [segment.tolist() for each in bars for segment in each.get_segments()]


@pytest.mark.parametrize(
    ("heights", "placed"),
    [
        ([0.5], [0.5]),
        ([0.2, 0.3], [0.2, 0.3]),
        ([0.5, 0.5, 0.9], [0.45, 0.55, 0.9]),
        # Two that are pushed apart push a third.
        ([0.5, 0.5, 0.58], [0.426667, 0.526667, 0.626667]),
        # The bounds push back, and the gaps are kept.
        ([0.0, 0.0], [0.0, 0.1]),
        ([1.0, 1.0, 1.0], [0.8, 0.9, 1.0]),
        ([], []),
    ],
)
def test_labels_move_as_little_as_needed(heights: list[float], placed: list[float]) -> None:
    assert apart(heights, 0.1) == placed


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (1.0, 9999.0, [1, 10, 100, 1000]),
        (1.0, 1000.0, [1, 3, 10, 30, 100, 300, 1000]),
        (1.0, 30.0, [1, 2, 5, 10, 20]),
        (100.0, 500.0, [100, 200, 300, 400, 500]),
    ],
)
def test_ticks_of_a_logarithmic_axis_are_round_numbers(low: float, high: float, ticks: list[float]) -> None:
    _, (panel,) = panels(1)
    panel.set_xscale("log")
    panel.set_xlim(low, high)
    plain_numbers(panel, "x")
    assert [tick for tick in panel.get_xticks() if low <= tick <= high] == pytest.approx(ticks)
    assert [tick for tick in panel.get_xticks(minor=True) if low <= tick <= high] == []
    assert [panel.xaxis.get_major_formatter()(value) for value in (1000.0, 10.0, 9.5, 0.25)] == [
        "1,000",
        "10",
        "9.5",
        "0.25",
    ]


# -- routing


def test_a_bar_is_divided_by_the_share_of_each_replica() -> None:
    first = cell("gorgo", share={"b": 0.95, "a": 0.05})
    second = cell("random", *(Run(row(records([1.0]), share=share)) for share in ({"a": 0.2, "b": 0.8}, {"a": 1.0})))
    figure = routing.shares(comparison({2.0: [first, second, cell("floor", share={})], 1.0: [second]}))
    half, whole = figure.axes
    bars = [[(bar.get_x(), bar.get_width(), bar.get_y()) for bar in part] for part in half.containers]
    # Replicas by name, policies from the top; random's is the mean of its two runs.
    assert bars == [
        [(0.0, pytest.approx(0.05), pytest.approx(-0.39)), (0.0, pytest.approx(0.6), pytest.approx(0.61))],
        [
            (pytest.approx(0.05), pytest.approx(0.95), pytest.approx(-0.39)),
            (0.6, pytest.approx(0.4), pytest.approx(0.61)),
        ],
    ]
    # A part of 5 % has no room for its figure.
    assert [text.get_text() for text in half.texts] == ["60%", "95%", "40%"]
    assert [text.get_position() for text in half.texts] == [
        pytest.approx((0.3, 1.0)),
        pytest.approx((0.525, 0.0)),
        pytest.approx((0.8, 1.0)),
    ]
    assert [label.get_text() for label in half.get_yticklabels()] == ["gorgo", "random"]
    assert (half.get_ylim(), half.get_xlim()) == ((1.5, -0.5), (0.0, 1.0005))
    assert half.xaxis.get_major_formatter()(0.5) == "50%"
    # What did not run at a load has an empty row there.
    assert [[width for _, width, _ in part] for part in _bars(whole)] == [[0.0, 0.6], [0.0, 0.4]]
    assert legend(figure) == ["a", "b"]
    assert figure.legends[0].get_title().get_text() == "share per replica"


def _bars(panel: Axes) -> list[list[tuple[float, float, float]]]:
    containers: Any = panel.containers
    return [[(bar.get_x(), bar.get_width(), bar.get_y()) for bar in part] for part in containers]


def fleet(count: int) -> dict[str, float]:
    return {f"r{number:02}": 1.0 / count for number in range(count)}


def test_a_bar_has_replicas_where_they_are_few_else_regions_else_the_largest() -> None:
    regions = {f"r{number:02}": "east" if number % 2 else "west" for number in range(9)}
    few = comparison({1.0: [cell("gorgo", share=fleet(8))]})
    known = Run(row(records([1.0]), share=fleet(9)), requests([1.0], regions=regions))
    many = comparison({1.0: [cell("gorgo", share=fleet(9))]})
    assert routing.parts(few) == ("replica", {name: name for name in fleet(8)})
    assert routing.parts(comparison({1.0: [cell("gorgo", known)]})) == ("region", regions)
    kind, belongs = routing.parts(many)
    assert kind == "replica"
    assert belongs == {name: name if name < "r07" else "others" for name in fleet(9)}
    each = {name: f"region of {name}" for name in fleet(9)}
    own = Run(row(records([1.0]), share=fleet(9)), requests([1.0], regions=each))
    assert routing.parts(comparison({1.0: [cell("gorgo", own)]}))[0] == "replica"


def test_the_largest_parts_are_those_with_most_traffic_over_all_runs() -> None:
    tilted = {name: 0.2 if name in ("r08", "r09") else 0.6 / 8 for name in fleet(10)}
    _, belongs = routing.parts(comparison({1.0: [cell("gorgo", share=fleet(10)), cell("random", share=tilted)]}))
    assert [name for name, part in belongs.items() if part != "others"] == [
        "r00", "r01", "r02", "r03", "r04", "r08", "r09",
    ]  # fmt: skip


def test_small_replicas_are_one_part() -> None:
    figure = routing.shares(comparison({1.0: [cell("gorgo", share=fleet(10))]}))
    (panel,) = figure.axes
    assert [width for ((_, width, _),) in _bars(panel)] == pytest.approx([0.1] * 7 + [0.3])
    assert legend(figure)[-1] == "others"


def test_cache_hits_are_joined_with_what_was_estimated() -> None:
    figure = routing.hits(
        comparison(
            {
                2.0: [
                    cell("gorgo", cache_hit=0.5, cache_hit_estimated=0.75),
                    cell("random", cache_hit=0.25, cache_hit_estimated=None),
                    cell("floor", cache_hit=None, cache_hit_estimated=None),
                ],
                1.0: [cell("gorgo", cache_hit=None, cache_hit_estimated=0.5)],
            }
        )
    )
    half, whole = figure.axes
    assert points(half) == [[(50.0, 0), (75.0, 0)], [(50.0, 0)], [(75.0, 0)], [(25.0, 1)]]
    assert points(whole) == [[(50.0, 0)]]
    assert [label.get_text() for label in half.get_yticklabels()] == ["gorgo", "random"]
    assert half.get_ylim() == (1.5, -0.5)
    assert half.xaxis.get_major_formatter()(50.0) == "50%"
    assert legend(figure) == ["reported by the engines", "believed by the router"]


# -- prediction


def test_predictions_are_of_requests_that_have_both_times() -> None:
    first = requests([10.0, 20.0, NAN, 40.0], predicted_ttft_ms=np.array([11.0, NAN, 33.0, 44.0]))
    second = requests([50.0], predicted_ttft_ms=np.array([55.0]))
    found = predictions(
        comparison(
            {
                1.0: [
                    cell("gorgo", Run(row(records([1.0])), first), Run(row(records([1.0])))),
                    cell("random", Run(row(records([1.0])), requests([1.0]))),
                ],
                2.0: [cell("gorgo", Run(row(records([1.0])), second))],
            }
        )
    )
    assert [(one.label, one.predicted_ms.tolist(), one.measured_ms.tolist()) for one in found] == [
        ("gorgo", [11.0, 44.0, 55.0], [10.0, 40.0, 50.0])
    ]


def guessed(predicted_ms: Sequence[float], measured_ms: Sequence[float]) -> Comparison:
    kept_run = Run(row(records([1.0])), requests(measured_ms, predicted_ttft_ms=np.array(predicted_ms)))
    return comparison({1.0: [cell("gorgo", kept_run)]})


def test_words_on_predictions_are_their_error_and_how_many_came_late() -> None:
    """Errors of 0, 10, 20, 30 and 40 ms: half within 20, 95 % within 38; two came later, one in time is not late."""
    found = predictions(guessed([100.0] * 5, [100.0, 110.0, 80.0, 130.0, 60.0]))
    assert prediction_words(found) == (
        "gorgo: half of 5 predictions are within 20 ms, 95 % within 38 ms; "
        "40% of the requests took longer than predicted."
    )


def test_like_predictions_are_one_point_with_the_middle_of_what_was_measured() -> None:
    """Two groups of eight: predicted 1 to 8 and 101 to 108, measured ten times that."""
    predicted = [*range(101, 109), *range(1, 9)]
    (found,) = predictions(guessed([float(one) for one in predicted], [10.0 * one for one in predicted]))
    figure = prediction_plot([found])
    (panel,) = figure.axes
    assert title(panel) == "gorgo"
    middle, diagonal = points(panel)
    assert middle == [(4.5, 45.0), (104.5, 1045.0)]
    # The middle 80 % of eight lies between 0.7 and 6.3 of the seven steps.
    low, high = (17.0, 1017.0), (73.0, 1073.0)
    corners: Any = panel.collections[0].get_paths()[0].vertices
    assert {(4.5, low[0]), (104.5, low[1]), (4.5, high[0]), (104.5, high[1])} == {
        (round(float(x), 6), round(float(y), 6)) for x, y in corners
    }
    assert diagonal == [(4.5, 4.5), (1073.0, 1073.0)]
    assert (panel.get_xscale(), panel.get_yscale()) == ("log", "log")
    assert (panel.get_xlabel(), panel.get_ylabel()) == ("predicted TTFT, ms", "measured TTFT, ms")


@pytest.mark.parametrize(("count", "groups"), [(1, 1), (15, 1), (16, 2), (160, 20), (500, 20)])
def test_groups_of_predictions_are_bounded_and_large_enough(count: int, groups: int) -> None:
    values = [float(number + 1) for number in range(count)]
    (panel,) = prediction_plot(predictions(guessed(values, values))).axes
    assert len(points(panel)[0]) == groups


def test_six_policies_have_a_panel() -> None:
    found = predictions(guessed([1.0, 2.0], [1.0, 2.0])) * 7
    assert len(prediction_plot(found).axes) == 6


def test_round_trips_are_medians_over_stretches_of_the_run_that_tells_most() -> None:
    """A run of 120 s has stretches of a second; two requests a second, one to each replica."""
    at_s = np.repeat(np.arange(121, dtype=np.float64), 2)
    told = requests(
        [1.0] * 242,
        scheduled_s=at_s,
        rtt_ms=np.where(np.arange(242) % 2, 50.0 + at_s, NAN),
        replica=np.arange(242, dtype=np.int32) % 2,
        replicas=("b", "a"),
    )
    few = requests([1.0, 1.0], rtt_ms=np.array([7.0, NAN]))
    found = round_trips(
        comparison(
            {
                1.0: [cell("random", Run(row(records([1.0])), few)), cell("gorgo", Run(row(records([1.0])), told))],
                2.0: [cell("nearest")],
            }
        )
    )
    assert found is not None
    assert found.label == "gorgo"
    # Replica b told none. The end of the run belongs to its last stretch.
    assert list(found.rtt_ms) == ["a"]
    assert found.at_s.tolist() == pytest.approx([0.5 + number for number in range(120)])
    assert found.rtt_ms["a"].tolist() == [50.0 + number for number in range(119)] + [169.5]
    assert round_trip_words(found) == "Round trips during one run of gorgo: a between 50 and 170 ms."
    (panel,) = round_trip_plot(found).axes
    assert points(panel)[0][0] == (0.5, 50.0)
    assert panel.get_ylim()[0] == 0.0
    assert (panel.get_xlabel(), panel.get_ylabel()) == ("seconds from the start", "round trip, ms")


def test_round_trips_of_the_busiest_replicas_are_drawn_by_name() -> None:
    """Thirteen replicas, number n with n + 1 requests: the one with a single request is left out."""
    replica = np.repeat(np.arange(13, dtype=np.int32), np.arange(1, 14))
    found = round_trips(
        comparison(
            {
                1.0: [
                    cell(
                        "gorgo",
                        Run(
                            row(records([1.0])),
                            requests(
                                [1.0] * len(replica),
                                rtt_ms=np.full(len(replica), 5.0),
                                replica=replica,
                                replicas=tuple(f"r{12 - number:02}" for number in range(13)),
                            ),
                        ),
                    )
                ]
            }
        )
    )
    assert found is not None
    assert list(found.rtt_ms) == [f"r{number:02}" for number in range(12)]


def test_a_stretch_without_a_request_is_a_gap_in_the_numbers_alone() -> None:
    told = requests([1.0, 1.0], scheduled_s=np.array([0.0, 120.0]), rtt_ms=np.array([5.0, 9.0]))
    found = round_trips(comparison({1.0: [cell("gorgo", Run(row(records([1.0])), told))]}))
    assert found is not None
    assert np.isnan(found.rtt_ms["a"]).sum() == 118
    (panel,) = round_trip_plot(found).axes
    assert points(panel) == [[(0.5, 5.0), (119.5, 9.0)]]


def test_without_a_round_trip_of_a_known_replica_there_are_none() -> None:
    lost = requests([1.0], rtt_ms=np.array([5.0]), replica=np.array([-1], dtype=np.int32))
    assert round_trips(comparison({1.0: [cell("gorgo", Run(row(records([1.0])), lost)), cell("random")]})) is None


def test_a_run_of_one_moment_has_its_round_trip_in_the_first_stretch() -> None:
    told = requests([1.0], rtt_ms=np.array([5.0]))
    found = round_trips(comparison({1.0: [cell("gorgo", Run(row(records([1.0])), told))]}))
    assert found is not None
    assert found.rtt_ms["a"][0] == 5.0


# -- tuning


def generation(
    number: int, weight: float, objective_ms: float | None, *, accepted: bool, best_ms: float | None = None
) -> ReportGeneration:
    sigma = None if number == 1 else 0.5 / (number + 1)
    return ReportGeneration(number, {"w": weight}, sigma, objective_ms, best_ms, accepted, "")


def test_a_tuning_plot_has_what_was_tried_and_what_was_in_force() -> None:
    figure = tuning_plot(
        [
            generation(0, 1.0, 100.0, accepted=True, best_ms=100.0),
            generation(1, 3.0, None, accepted=False),
            generation(2, 2.0, 80.0, accepted=True, best_ms=90.0),
            generation(3, 4.0, 200.0, accepted=False, best_ms=90.0),
        ]
    )
    weight, sigma, objective = figure.axes
    accepted, rejected, force = weight.lines
    assert (xy(accepted), xy(rejected)) == ([(0, 1.0), (2, 2.0)], [(1, 3.0), (3, 4.0)])
    assert (accepted.get_markerfacecolor(), rejected.get_markerfacecolor()) == (accepted.get_color(), "none")
    # The last accepted weight stays in force up to the last generation.
    assert (xy(force), force.get_drawstyle()) == ([(0, 1.0), (2, 2.0), (3, 2.0)], "steps-post")
    assert points(sigma) == [[(0.0, 0.5), (2.0, 0.5 / 3), (3.0, 0.125)]]
    assert points(objective) == [
        [(0.0, 100.0), (2.0, 80.0)],
        [(3.0, 200.0)],
        [(0.0, 100.0), (2.0, 90.0), (3.0, 90.0)],
    ]
    assert [panel.get_yscale() for panel in figure.axes] == ["log"] * 3
    assert [title(panel) for panel in figure.axes] == [
        "w",
        "sigma",
        "objective: p95 TTFT of the window, ms",
    ]
    assert objective.get_xlabel() == "generation"
    assert legend(figure) == ["accepted", "rejected", "incumbent"]


@pytest.mark.parametrize(("values", "scale"), [([0.0, 1.0], "linear"), ([2.0, 2.0], "linear"), ([1.0, 2.0], "log")])
def test_a_scale_is_logarithmic_where_there_is_something_to_see_by_it(values: list[float], scale: str) -> None:
    figure = tuning_plot([generation(number, value, None, accepted=False) for number, value in enumerate(values)])
    assert figure.axes[0].get_yscale() == scale
    assert [len(panel.lines) for panel in figure.axes] == [1, 1, 0]


def test_eight_weights_have_a_panel() -> None:
    weights = {f"w{number}": 1.0 for number in range(9)}
    figure = tuning_plot([ReportGeneration(0, weights, None, None, None, True, "")])
    assert len(figure.axes) == 10
