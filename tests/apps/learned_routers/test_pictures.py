"""The data behind the pictures, of runs whose figures are made up; and the files."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from gorgo.apps.learned_routers import command
from gorgo.apps.learned_routers.comparison import RouterComparison, Runs
from gorgo.apps.learned_routers.drawing import draw, write_pictures
from gorgo.apps.learned_routers.groups import comparisons
from gorgo.apps.learned_routers.measure import RouterRun, RouterTask
from gorgo.apps.learned_routers.model_errors import FittedRound
from gorgo.apps.learned_routers.pictures import Picture, PicturePanel, pictures, variants_of
from gorgo.apps.learned_routers.slices import TimeSlice
from gorgo.apps.results import ResultRow, Spread
from gorgo.errors import MissingExtra

SEEDS = range(2)


def made_up(task: RouterTask) -> RouterRun:
    """Mean TTFT of 1,000 ms for seed 0 and 1,100 for seed 1, by tau and rate as told; half of it to each replica."""
    tau = task.variant.removeprefix("tau ")
    ms = 1000.0 + 100.0 * task.seed + (1000.0 * float(tau) if tau != task.variant else 0.0)
    row = ResultRow(
        trace=task.traffic.label,
        time_scale=1.0,
        policy=task.variant,
        weights={},
        seed=task.seed,
        source="simulated",
        n=200,
        errors=0,
        ttft_ms=Spread(mean=ms, p50=ms, p95=2 * ms, p99=3 * ms),
        e2e_s=Spread(),
        itl_ms=Spread(),
        cache_hit=None,
        cache_hit_estimated=None,
        share={"a-0": 0.25, "a-1": 0.75},
        prediction_error_ms=Spread(),
        slip_ms_p95=None,
        e2e_per_token_ms=Spread(mean=30.0),
        tokens_per_s=500.0,
    )
    learns = task.variant.startswith(("lodestar", "predicted", "gorgo-residual"))
    return RouterRun(
        row=row,
        replica_ttft_ms={"a-0": ms, "a-1": 2 * ms},
        fallbacks={},
        slices=[slice_of(60.0 * number, ms, learns=learns and number > 0) for number in range(3)],
        adopted_s=[],
        rho=None,
        cpu_s=1.0,
        fitted=[FittedRound(samples=1000, fit_cpu_s=0.5, ttft_mape=None, tpot_mape=None)] if learns else [],
    )


def slice_of(begins_s: float, ms: float, *, learns: bool) -> TimeSlice:
    return TimeSlice(
        begins_s=begins_s,
        n=10,
        ttft_ms_mean=ms,
        ttft_ms_p99=3 * ms,
        tpot_ms_mean=20.0,
        e2e_ms_per_token=30.0,
        error_ratio=0.25 if learns else None,
        hit=0.4,
        best_hit=0.5,
        predicted_ttft_ms=0.5 * ms if learns else None,
        modelled_ttft_ms=ms if learns else None,
        predicted_tpot_ms=15.0 if learns else None,
        modelled_tpot_ms=20.0 if learns else None,
    )


def chosen(*groups: str) -> list[RouterComparison]:
    return [one for one in comparisons() if one.group in groups]


def drawn(*groups: str) -> dict[str, Picture]:
    some = chosen(*groups)
    return {one.name: one for one in pictures(some, runs_of(some), SEEDS)}


def runs_of(some: Sequence[RouterComparison]) -> Runs:
    return {task: made_up(task) for one in some for task in one.tasks(SEEDS)}


def points(panel: PicturePanel, label: str) -> Iterator[tuple[Any, float, float, float]]:
    yield from ((one.x, one.value, one.low, one.high) for one in panel.curves[label])


def test_bars_are_means_over_seeds_per_traffic_with_the_least_and_the_most_seed() -> None:
    found = drawn("lodestar", "lodestar-more")
    mean, p99 = found["lodestar-8xA30"].panels
    assert (mean.title, p99.title, mean.kind) == ("mean TTFT, ms", "p99 TTFT, ms", "bars")
    assert list(points(mean, "lodestar")) == [("50% shared, 6/s", 1050.0, 1000.0, 1100.0)]
    assert list(points(p99, "gorgo-ms")) == [("50% shared, 6/s", 3150.0, 3000.0, 3300.0)]
    more = found["lodestar-more-7xL20-8xA30"].panels[0]
    assert len(more.curves["prefix-cache-and-load"]) == 8


def test_each_replica_has_its_mean_ttft_and_its_requests() -> None:
    ttft, requests = drawn("lodestar")["replicas-8xA30"].panels
    assert [point[:2] for point in points(ttft, "lodestar")] == [("a-0", 1050.0), ("a-1", 2100.0)]
    assert [point[:2] for point in points(requests, "lodestar")] == [("a-0", 50.0), ("a-1", 150.0)]


def test_the_sweep_of_tau_is_a_curve_and_other_policies_are_dashed_lines() -> None:
    (panel,) = drawn("tau")["tau-toolagent"].panels
    curve = list(points(panel, "prefix-threshold"))
    assert [point[0] for point in curve] == [0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
    assert list(curve[0]) == pytest.approx([0.2, 1250.0, 1200.0, 1300.0])
    assert panel.dashed == {"gorgo-ms": 1050.0, "lodestar": 1050.0}


def test_the_shift_is_shown_over_minutes_as_error_ttft_and_hits() -> None:
    error, ttft, hit, best = drawn("shift")["shift-8xA30"].panels
    assert [point[:2] for point in points(error, "lodestar, frozen")] == [(1.0, 25.0), (2.0, 25.0)]
    assert "prefix-cache-and-load" not in error.curves, "it predicts nothing"
    assert [point[:2] for point in points(ttft, "prefix-cache-and-load")] == [(0.0, 1050), (1.0, 1050), (2.0, 1050)]
    assert [next(points(panel, "lodestar"))[1] for panel in (hit, best)] == [40.0, 50.0]


def test_pools_have_bars_and_the_time_of_a_round_by_its_samples() -> None:
    found = drawn("pools")
    (panel,) = found["pools-rounds"].panels
    assert list(points(panel, "lodestar, all data")) == [(1000.0, 0.5, 0.5, 0.5)] * 2
    assert "pools-8xA30" in found


def test_the_k_filter_has_a_sliding_mean() -> None:
    (panel,) = drawn("k-filter")["k-filter-8xA30"].panels
    assert {"lodestar", "lodestar, no K-filter"} < set(panel.curves)


def test_predicted_and_measured_times_are_beside_each_other_for_what_learns() -> None:
    found = drawn("accuracy")
    assert list(found) == ["accuracy-10x2xH100-usage", "accuracy-10x2xH100-events"]
    panels = found["accuracy-10x2xH100-usage"].panels
    assert [panel.title for panel in panels] == [
        f"{policy}: mean {time}, ms" for policy in ("predicted-latency", "gorgo-residual") for time in ("TTFT", "TPOT")
    ]
    first = panels[0]
    assert [point[:2] for point in points(first, "predicted")] == [(1.0, 525.0), (2.0, 525.0)]
    assert [point[:2] for point in points(first, "measured")] == [(1.0, 1050.0), (2.0, 1050.0)]


def test_scenarios_are_curves_over_the_rate() -> None:
    found = drawn("scenarios", "qps")
    per_token, tokens = found["qps-scenario A"].panels
    assert [point[:2] for point in points(per_token, "load-prefix 1:1:1")] == [(12.0, 30.0), (21.0, 30.0), (30.0, 30.0)]
    assert next(points(tokens, "round-robin"))[1] == 500.0
    assert set(found) == {f"qps-{name}" for name in (*map("scenario {}".format, "ABCD"), "ShareGPT-like")}


def test_a_group_without_a_picture_has_none() -> None:
    assert drawn("production", "oracle") == {}


def test_every_variant_of_a_bar_chart_has_a_bar() -> None:
    for group in ("lodestar", "motivation", "guards"):
        for one in chosen(group):
            (panel, _) = drawn(group)[f"{group}-{one.fleet}"].panels
            assert set(variants_of(one)) <= set(panel.curves)


def test_files_are_svg_with_the_titles_as_text(tmp_path: Path) -> None:
    some = list(drawn("tau").values())
    (path,) = write_pictures(tmp_path, some)
    assert path.name == "tau-toolagent.svg"
    assert ElementTree.parse(path).getroot().tag.endswith("svg")
    assert "mean TTFT, ms: 8xA30: toolagent, 3/s" in path.read_text()


def test_a_picture_of_a_document_is_a_small_png(tmp_path: Path) -> None:
    (path,) = write_pictures(tmp_path, list(drawn("tau").values()), suffix="png")
    assert path.name == "tau-toolagent.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size < 40_000


def test_bars_are_drawn_with_a_bar_per_traffic_and_policy() -> None:
    (picture,) = drawn("motivation").values()
    axes = draw(picture).get_axes()
    assert [axis.get_title(loc="left") or axis.get_title() for axis in axes] == ["mean TTFT, ms", "p99 TTFT, ms"]
    assert [len(axis.patches) for axis in axes] == [6, 6]


def test_without_matplotlib_the_error_says_what_to_install_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtra, match=r"a picture needs matplotlib.*gorgo-router\[report\]"):
        write_pictures(tmp_path, [])
    with pytest.raises(SystemExit):
        command.main(["--only", "motivation", "--pictures", "--out", str(tmp_path)])
    assert "--pictures: a picture needs matplotlib" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_run_that_is_missing_leaves_its_point_out() -> None:
    some = chosen("motivation")
    runs = {task: run for task, run in runs_of(some).items() if task.variant != "gorgo-ms"}
    (picture,) = pictures(some, runs, SEEDS)
    assert picture.panels[0].curves["gorgo-ms"] == []
