"""The data behind the pictures, of runs whose figures are made up; and the files."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from experiments import command
from experiments.comparison import VariantComparison
from experiments.pictures import Panel, Picture, draw, pictures_of, write_pictures
from experiments.simulated import SimTask, TaskRun
from experiments.systems import llm_d, lodestar
from gorgo.errors import MissingExtra
from gorgo.lab.results import Spread
from tests.experiments.rows import row

SEEDS = range(2)
PICTURES = {**lodestar.PICTURES, **llm_d.PICTURES}


def made_up(task: SimTask) -> TaskRun:
    """Mean TTFT of 1,000 ms for seed 0 and 1,100 for seed 1."""
    ms = 1000.0 + 100.0 * task.seed
    learns = task.variant.policy in ("lodestar", "predicted-latency", "gorgo-residual")
    figures = row(task.variant.policy, seed=task.seed)
    spread = Spread(mean=ms, p50=ms, p95=2 * ms, p99=3 * ms)
    per_token = Spread(mean=30.0)
    slices = [
        {
            "begins_s": 60.0 * number,
            "ttft_ms_mean": ms,
            "error_ratio": 0.25 if learns else None,
            "hit": 0.4,
            "best_hit": 0.5,
            "predicted_ttft_ms": 0.5 * ms if learns else None,
            "modelled_ttft_ms": ms if learns else None,
        }
        for number in range(3)
    ]
    changed = {"ttft_ms": spread, "e2e_per_token_ms": per_token, "tokens_per_s": 500.0}
    return TaskRun(row=type(figures)(**{**_fields(figures), **changed}), cpu_s=1.0, slices=slices)


def _fields(of: Any) -> dict[str, Any]:
    return {name: getattr(of, name) for name in of.__slots__}


def chosen(*groups: str) -> list[VariantComparison]:
    return [one for one in (*lodestar.comparisons(), *llm_d.comparisons()) if one.group in groups]


def drawn(*groups: str) -> dict[str, Picture]:
    some = chosen(*groups)
    runs = {task: made_up(task) for one in some for task in one.tasks(SEEDS)}
    return {one.name: one for one in pictures_of(some, runs, SEEDS, PICTURES)}


def points(panel: Panel, label: str) -> Iterator[tuple[Any, float, float, float]]:
    yield from ((one.x, one.value, one.low, one.high) for one in panel.curves[label])


def test_bars_are_means_over_seeds_per_traffic_with_the_least_and_the_most_seed() -> None:
    found = drawn("lodestar", "lodestar-more")
    mean, p99 = found["lodestar-8xA30"].panels
    assert (mean.title, p99.title, mean.kind) == ("mean TTFT, ms", "p99 TTFT, ms", "bars")
    assert list(points(mean, "lodestar")) == [("50% shared, 6/s", 1050.0, 1000.0, 1100.0)]
    assert list(points(p99, "gorgo-ms")) == [("50% shared, 6/s", 3150.0, 3000.0, 3300.0)]
    more = found["lodestar-more-7xL20-8xA30"].panels[0]
    assert len(more.curves["prefix-cache-and-load"]) == 8


def test_the_shift_is_shown_over_time_and_what_predicts_nothing_has_no_curve_of_errors() -> None:
    error, ttft, hit, best = drawn("shift")["shift-8xA30"].panels
    assert [point[:2] for point in points(error, "lodestar, frozen")] == [(0.0, 0.25), (60.0, 0.25), (120.0, 0.25)]
    assert "prefix-cache-and-load" not in error.curves
    assert [point[1] for point in points(ttft, "prefix-cache-and-load")] == [1050.0] * 3
    assert [next(points(panel, "lodestar"))[1] for panel in (hit, best)] == [0.4, 0.5]


def test_scenarios_are_curves_over_the_rate() -> None:
    found = drawn("qps")
    per_token, tokens = found["qps-scenario A"].panels
    assert [point[:2] for point in points(per_token, "load-prefix 1:1:1")] == [(12.0, 30.0), (21.0, 30.0)]
    assert next(points(tokens, "round-robin"))[1] == 500.0
    assert set(found) == {f"qps-{name}" for name in (*map("scenario {}".format, "ABCD"), "ShareGPT-like")}


def test_a_group_without_a_picture_has_none() -> None:
    assert drawn("production", "oracle") == {}


def test_every_variant_of_a_bar_chart_has_a_bar() -> None:
    for group in ("lodestar", "motivation", "guards"):
        for one in chosen(group):
            (panel, _) = drawn(group)[one.family].panels
            assert set(one.variants) <= set(panel.curves)


def test_a_run_that_is_missing_leaves_its_bar_out() -> None:
    some = chosen("motivation")
    runs = {task: made_up(task) for one in some for task in one.tasks(SEEDS) if task.variant.policy != "gorgo-ms"}
    (picture,) = pictures_of(some, runs, SEEDS, PICTURES)
    assert "gorgo-ms" not in picture.panels[0].curves


def test_files_are_svg_with_the_titles_as_text_or_a_small_png(tmp_path: Path) -> None:
    some = list(drawn("motivation").values())
    (path,) = write_pictures(tmp_path, some)
    assert path.name == "motivation-7xL20.svg"
    assert ElementTree.parse(path).getroot().tag.endswith("svg")
    assert "mean TTFT, ms" in path.read_text()
    (png,) = write_pictures(tmp_path, some, suffix="png")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert png.stat().st_size < 40_000


def test_bars_are_drawn_with_a_bar_per_traffic_and_policy() -> None:
    (picture,) = drawn("motivation").values()
    axes = draw(picture).get_axes()
    assert [axis.get_title(loc="left") or axis.get_title() for axis in axes] == ["mean TTFT, ms", "p99 TTFT, ms"]
    assert [len(axis.patches) for axis in axes] == [6, 6]


def test_curves_over_time_are_drawn_with_what_begins_at_a_time() -> None:
    panel = drawn("shift")["shift-8xA30"].panels[1]
    (axis,) = draw(Picture("p", [Panel("t", "x", "times", panel.curves, {60.0: "half"})])).get_axes()
    assert len(axis.lines) == len(panel.curves) + 1
    assert [text.get_text() for text in axis.texts] == ["half"]


def test_without_matplotlib_the_error_says_what_to_install_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtra, match=r"a picture needs matplotlib.*gorgo-router\[report\]"):
        write_pictures(tmp_path, [])
    arguments = ["--system", "lodestar", "--only", "motivation", "--pictures", "--out", str(tmp_path)]
    assert command.main(arguments) == 1
    assert "a picture needs matplotlib" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
