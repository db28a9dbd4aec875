"""`gorgo report` on the command line."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from typer.testing import CliRunner

from gorgo.cli import app
from gorgo.errors import InputError, ReportError
from gorgo.lab.report.plots import (
    PLOTS,
    PlotPoint,
    load_plot,
    load_points,
    ratio,
    ratio_plot,
    ratio_points,
    tail_plot,
    tail_points,
    tuning_plot,
)
from gorgo.lab.report.report import report, tuning_csv
from gorgo.lab.report.runs import (
    ReportGeneration,
    find_results,
    format_weights,
    read_history,
    read_requests,
    read_results,
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
from gorgo.lab.results import Spread, write_results
from gorgo.lab.simulate.compare import Ratio, ratio_of_rows, ttft_ms_p95
from tests.lab.report.builders import cell, comparison, generation, p95_cell, records, row, saved_cell, write_run

REGIONS = Path(__file__).parents[3] / "regions.yaml"


def test_the_command_prints_where_the_page_is(tmp_path: Path) -> None:
    write_run(tmp_path, [10.0, 20.0])
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert (result.exit_code, result.stdout) == (0, f"{tmp_path / 'report.html'}\n")
    assert (tmp_path / "report.html").read_text().startswith("<!DOCTYPE html>")


def test_files_of_a_simulation_are_read_with_their_references(tmp_path: Path) -> None:
    words = ["simulate", "chat-small", "--limit", "20", "--policy", "gorgo-ms", "--policy", "random", "--jobs", "1"]
    result = CliRunner().invoke(app, [*words, "--config", str(REGIONS), "--out", str(tmp_path)])
    assert result.exit_code == 0, result.stderr
    found = find_results(tmp_path)
    (comparison,) = found.comparisons
    assert comparison.labels == ["gorgo-ms", "random", "floor", "oracle", "pinned"]
    assert [[len(ttft_ms) for ttft_ms in cell.ttft_ms] for cell in comparison.cells] == [[20]] * 5
    assert found.left_out == []


_WITHOUT = "import sys; sys.modules[sys.argv.pop(1)] = None; from gorgo.cli import main; main()"


@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_without_the_extra_the_command_says_what_to_install(tmp_path: Path, package: str) -> None:
    """In a process of its own: here both are loaded already."""
    write_run(tmp_path, [10.0, 20.0])
    command = [sys.executable, "-c", _WITHOUT, package, "report", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    said = f"gorgo: a report needs {package}, which is not installed: pip install 'gorgo-router[report]'\n"
    assert done.stderr == said
    assert not (tmp_path / "report.html").exists()


def test_a_damaged_file_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("{}")
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"gorgo: {tmp_path}/results.json: {{}}; input should be a valid list")


def test_a_page_that_cannot_be_written_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "history.json").write_text("[]")
    (tmp_path / "report.html").mkdir()
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 1
    assert "Is a directory" in result.stderr


def test_a_full_disk_leaves_the_page_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    write_run(tmp_path, [10.0, 20.0])
    (tmp_path / "report.html").write_text("an earlier one")
    monkeypatch.setattr(os, "fsync", full)
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert (result.exit_code, result.stderr) == (1, "gorgo: [Errno 28] No space left on device\n")
    assert (tmp_path / "report.html").read_text() == "an earlier one"


def test_a_folder_whose_name_is_no_text_has_a_page(tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"caf\xe9")
    odd.mkdir()
    (odd / "history.json").write_text("[]")
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 0, result.stderr
    assert r"caf\udce9" in (tmp_path / "report.html").read_text()


def refusal(folder: Path) -> str:
    with pytest.raises(ReportError) as caught:
        find_results(folder)
    return str(caught.value)


def test_rows_that_a_demo_writes_twice_count_once_and_keep_their_requests(tmp_path: Path) -> None:
    rows = [write_run(tmp_path / name, [10.0, 20.0], name, source="live") for name in ("gorgo", "random")]
    write_results(tmp_path, [*rows, replace(rows[0], seed=7)])
    (comparison,) = find_results(tmp_path).comparisons
    runs = [([row.seed for row in cell.rows.values()], len(cell.ttft_ms)) for cell in comparison.cells]
    assert (comparison.labels, runs) == (["gorgo", "random"], [([0, 7], 1), ([0], 1)])


def test_equal_live_rows_in_folders_side_by_side_are_two_runs(tmp_path: Path) -> None:
    for name in ("first", "second"):
        write_run(tmp_path / name, [10.0, 20.0], source="live")
    found = find_results(tmp_path)
    assert [*found.comparisons[0].cells[0].rows] == [(0, 0, None), (0, 1, None)]
    assert found.left_out == []


@pytest.mark.parametrize("digest", ["0123456789abcdef", None])
def test_copies_of_a_simulated_run_count_once_and_the_page_says_so(tmp_path: Path, digest: str | None) -> None:
    for name in ("first", "second", "third"):
        rows = [row("gorgo", [10.0 + seed], seed=seed, digest=digest and f"{digest}{seed}") for seed in (0, 1)]
        write_results(tmp_path / name, rows)
    found = find_results(tmp_path)
    assert [*found.comparisons[0].cells[0].rows] == [(0, 0, None), (1, 0, None)]
    assert [text.partition(": ")[2] for text in found.left_out] == [
        "2 copies of simulated runs that count already: equal digests count once"
    ] * 2
    assert "2 copies of simulated runs" in report(found)[0]


def test_three_copies_of_a_folder_leave_an_interval_as_wide_as_one(tmp_path: Path) -> None:
    def interval(folder: Path) -> tuple[float | None, float | None]:
        (comparison,) = find_results(folder).comparisons
        gorgo, random = comparison.cells
        found = ratio(gorgo, random, ttft_ms_p95)
        assert found is not None
        return found.low, found.high

    rows = [
        row(policy, [10.0 + at + seed * scale], seed=seed, digest=f"{policy}{seed}")
        for policy, at, scale in (("gorgo", 0.0, 1.0), ("random", 2.0, 0.3))
        for seed in range(3)
    ]
    for copies in (1, 3):
        for number in range(copies):
            write_results(tmp_path / f"{copies}" / f"{number}", rows)
    assert interval(tmp_path / "3") == interval(tmp_path / "1")


def test_a_digest_with_other_figures_is_left_out_with_its_reason(tmp_path: Path) -> None:
    for number, each_ms in enumerate(([10.0], [20.0])):
        write_results(tmp_path / str(number), [row("gorgo", each_ms, digest="0123456789abcdef")])
    found = find_results(tmp_path)
    assert [row.ttft_ms.p95 for row in found.comparisons[0].cells[0].rows.values()] == [10.0]
    assert ["the code changed between them" in text for text in found.left_out] == [True]


def test_unlike_settings_of_one_trace_are_neither_averaged_nor_paired(tmp_path: Path) -> None:
    for setting, each_ms in (("aa", [10.0]), ("bb", [30.0])):
        rows = [row(policy, each_ms, setting=setting, digest=f"{setting} {policy}") for policy in ("gorgo", "random")]
        write_results(tmp_path / setting, rows)
    found = find_results(tmp_path)
    assert [one.title for one in found.comparisons] == [
        f"small.jsonl, simulated, setting {setting}" for setting in ("aa", "bb")
    ]
    means = [[ttft_ms_p95(cell.mean) for cell in one.cells] for one in found.comparisons]
    assert means == [[10.0, 10.0], [30.0, 30.0]]
    assert "neither averaged nor paired" in report(found)[0]


def test_traces_and_sources_have_sections_of_their_own(tmp_path: Path) -> None:
    for number, (trace, source) in enumerate((("b", "live"), ("a", "simulated"), ("a", "live"))):
        write_run(tmp_path / str(number), [10.0], trace=trace, source=source)
    assert [one.title for one in find_results(tmp_path).comparisons] == ["a, live", "a, simulated", "b, live"]


def test_one_policy_with_two_weight_sets_has_two_names(tmp_path: Path) -> None:
    write_results(tmp_path, [row(weights=weights) for weights in ({"w_rtt": 0.5, "w_queue": 2.0}, None)])
    labels = find_results(tmp_path).comparisons[0].labels
    assert labels == ["gorgo (w_rtt 0.5, w_queue 2)", "gorgo (weights unknown)"]
    assert format_weights({}) == "weights unknown"


def test_policies_are_in_the_order_of_the_readme_and_references_last(tmp_path: Path) -> None:
    names = ("zebra", "oracle", "random", "gorgo", None)
    write_results(tmp_path, [row(name, time_scale=time_scale) for time_scale in (1.0, 2.0) for name in names])
    (comparison,) = find_results(tmp_path).comparisons
    assert list(comparison.loads) == [0.5, 1.0]
    assert comparison.labels == ["gorgo", "random", "unnamed policy", "zebra", "oracle"]
    assert [cell.label for cell in comparison.loads[1.0]] == comparison.labels


def test_windows_of_a_run_are_units_of_an_interval_and_share_the_run_s_requests(tmp_path: Path) -> None:
    """Two seeds of a window are one unit, as `gorgo simulate` prints it."""
    for policy, scale in (("gorgo", 1.0), ("random", 2.0)):
        for seed in range(2):
            values = [10.0 + scale * window + seed for window in range(3)]
            folder = tmp_path / f"{policy}-{seed}"
            write_run(folder, values, policy, seed=seed)
            windows = [row(policy, [one], seed=seed, window=number) for number, one in enumerate(values)]
            write_results(folder, windows)
    found = find_results(tmp_path)
    assert found.left_out == []
    (comparison,) = found.comparisons
    gorgo, random = comparison.cells
    assert [len(ttft_ms) for ttft_ms in gorgo.ttft_ms] == [3, 3]
    rows = [[*cell.rows.values()] for cell in (gorgo, random)]
    assert ratio(gorgo, random, ttft_ms_p95) == ratio_of_rows(rows[0], rows[1], ttft_ms_p95)
    assert (ratio(gorgo, random, ttft_ms_p95) or Ratio(0, 0, 0, 0)).n == 3


def test_requests_without_a_row_are_left_out_with_the_reason(tmp_path: Path) -> None:
    write_run(tmp_path / "ended", [10.0])
    write_run(tmp_path / "not", [10.0])
    (tmp_path / "not" / "results.json").unlink()
    write_run(tmp_path / "two", [10.0])
    write_results(tmp_path / "two", [row("random"), row("gorgo")])
    assert find_results(tmp_path).left_out == [
        f"{tmp_path}/two/requests.jsonl: belongs to no row, because the results.json beside it has 2",
        f"{tmp_path}/not/requests.jsonl: no results.json beside it: the run did not end",
    ]


def test_requests_of_another_run_are_refused(tmp_path: Path) -> None:
    write_run(tmp_path, [10.0, 20.0])
    write_results(tmp_path, [row()])
    assert "requests.jsonl: 2 lines, but n is 1 in results.json: they are of different runs" in refusal(tmp_path)


def test_a_folder_without_results_is_refused_with_what_was_expected(tmp_path: Path) -> None:
    expected = f"{tmp_path}: no results.json and no history.json in it or below; expected what --out DIR wrote"
    assert refusal(tmp_path) == expected
    assert refusal(tmp_path / "none") == f"{tmp_path}/none: no such folder"
    (tmp_path / "file").touch()
    assert refusal(tmp_path / "file") == f"{tmp_path}/file: not a folder"


def test_a_history_alone_is_enough(tmp_path: Path) -> None:
    (tmp_path / "history.json").write_text(json.dumps([generation(0)]))
    ((path, generations),) = find_results(tmp_path).histories.items()
    assert (path, generations[0].objective_ms) == ("history.json", 900.0)


@pytest.mark.parametrize("name", ["results.json", "requests.jsonl", "history.json"])
def test_a_pipe_is_not_read(tmp_path: Path, name: str) -> None:
    write_results(tmp_path / "good", [row()])
    (tmp_path / "bad").mkdir()
    os.mkfifo(tmp_path / "bad" / name)
    found = find_results(tmp_path)
    assert (len(found.comparisons), found.histories, found.left_out) == (1, {}, [])


#: A different value in every key.
FULL = row(
    "random",
    trace="mine",
    time_scale=1.25,
    weights={"a": -0.5, "b": 2.0},
    seed=3,
    source="live",
    n=9,
    errors=2,
    ttft_ms=Spread(1.0, 2.0, 3.0, 4.0),
    e2e_s=Spread(5.0, 6.0, 7.0, 8.0),
    itl_ms=Spread(9.0, 10.0, 11.0, 12.0),
    cache_hit=0.25,
    cache_hit_estimated=0.75,
    share={"a": 0.5, "b": 0.5},
    prediction_error_ms=Spread(13.0, 14.0, 15.0),
    slip_ms_p95=16.0,
)


def with_key(folder: Path, **changes: Any) -> Path:
    (folder / "results.json").write_text(json.dumps([FULL.as_json(), {**FULL.as_json(), **changes}]))
    return folder / "results.json"


def test_a_row_is_read_as_it_was_written(tmp_path: Path) -> None:
    unknown = replace(FULL, policy=None, weights=None, cache_hit=None, ttft_ms=Spread(), slip_ms_p95=None)
    odd = replace(FULL, trace="caf\udce9", cache_hit=1, n=2**53, weights={})  # file names need not be text
    write_results(tmp_path, [FULL, unknown, odd])
    assert read_results(tmp_path / "results.json") == [FULL, unknown, odd]
    assert read_results(with_key(tmp_path, **{"a key of tomorrow": []})) == [FULL, FULL]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cache_hit": 1.001}, "cache_hit is 1.001; input should be less than or equal to 1"),
        ({"cache_hit": -0.001}, "cache_hit is -0.001; input should be greater than or equal to 0"),
        ({"n": 2**53 + 2}, "n is 9007199254740994; input should be less"),
        ({"n": 1.5}, "n is 1.5; input should be a valid integer"),
        ({"errors": -1}, "errors is -1; input should be greater than or equal to 0"),
        ({"time_scale": 0}, "time_scale is 0; input should be greater"),
        ({"time_scale": True}, "time_scale is True; input should be a valid number"),
        ({"time_scale": "2"}, "time_scale is '2'; input should be a valid number"),
        ({"cache_hit": float("nan")}, "cache_hit is nan; input should be a finite number"),
        ({"ttft_ms": {"mean": -1}}, "ttft_ms.mean is -1; input should be greater than or equal to 0"),
        ({"itl_ms": 3}, "itl_ms is 3; expected a JSON object"),
        ({"weights": {"a": None}}, "weights.a is None; input should be a valid number"),
        ({"share": None}, "share is None; input should be a valid"),
        ({"policy": 7}, "policy is 7; input should be a valid string"),
        ({"source": "x" * 99}, "source is 'xxxxxxxxxxxx...xxxxxxxxxxxxx'; input should be"),
    ],
)
def test_a_wrong_value_is_refused_with_row_key_and_expectation(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ReportError) as caught:
        read_results(with_key(tmp_path, **changes))
    assert str(caught.value).startswith(f"{tmp_path}/results.json, row 2: {message}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"[\n{", ": not JSON (Expecting property name enclosed in double quotes: line 2 column 2"),
        (b'["\n\xff"]', ": not JSON ('utf-8' codec can't decode byte 0xff in position 3"),
        (b"[" * 100_000, ": not JSON"),
        (b"3", ": 3; input should be a valid list"),
        (b'{"a": 1}', ": {'a': 1}; input should be a valid list"),
        (b"[3]", ", row 1: 3; expected a JSON object"),
        (b"[{}]", ", row 1: trace is missing; field required"),
    ],
)
def test_a_file_without_rows_is_refused_with_its_line(tmp_path: Path, text: bytes, message: str) -> None:
    (tmp_path / "results.json").write_bytes(text)
    with pytest.raises(ReportError) as caught:
        read_results(tmp_path / "results.json")
    assert str(caught.value).startswith(f"{tmp_path}/results.json{message}")


def test_a_file_too_large_for_results_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = with_key(tmp_path)
    monkeypatch.setattr("gorgo.lab.report.runs.MAX_BYTES", path.stat().st_size)
    assert len(read_results(path)) == 2
    monkeypatch.setattr("gorgo.lab.report.runs.MAX_BYTES", path.stat().st_size - 1)
    with pytest.raises(ReportError, match="larger than 0 MB; expected a results file"):
        read_results(path)


def test_a_history_is_read_as_a_list_or_as_the_command_prints_it(tmp_path: Path) -> None:
    entries = [
        generation(3, objective_ms=None, sigma=None, accepted=False, reason=None),
        generation(4, weights={"w": 1}, sigma=0.25, objective_ms=5, incumbent_objective_ms=6),
    ]
    for value in (entries, {"generations": entries}):
        (tmp_path / "history.json").write_text(json.dumps(value))
        assert read_history(tmp_path / "history.json") == [
            ReportGeneration(3, {"w_rtt": 0.5, "w_queue": 0.1}, None, None, 1000.0, False, None),
            ReportGeneration(4, {"w": 1.0}, 0.25, 5.0, 6.0, True, "lower p95 TTFT"),
        ]


@pytest.mark.parametrize("change", [{"accepted": 1}, {"weights": None}, {"sigma": "big"}, {"number": -1}])
def test_a_damaged_history_is_refused_with_its_generation(tmp_path: Path, change: dict[str, Any]) -> None:
    (tmp_path / "history.json").write_text(json.dumps([generation(0), {**generation(1), **change}]))
    with pytest.raises(ReportError, match=f"history.json, generation 2: {next(iter(change))} is "):
        read_history(tmp_path / "history.json")


def lines(path: Path, *changes: dict[str, Any]) -> Path:
    made = [record.as_json() | change for record, change in zip(records([1.0] * len(changes)), changes, strict=True)]
    path.write_text("".join(json.dumps(line) + "\n\n" for line in made))
    return path


def test_latencies_are_of_requests_that_succeeded(tmp_path: Path) -> None:
    given = ({"ttft_ms": 0}, {"ttft_ms": None}, {"error": "timeout: 1 s"}, {"error": "caf\udce9"}, {"ttft_ms": 2**53})
    count, ttft_ms = read_requests(lines(tmp_path / "requests.jsonl", *given))
    assert (count, ttft_ms.tolist()) == (5, [0.0, 2.0**53])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": ', "not JSON"),
        ("\xff", "not JSON"),
        ("x" * (4 << 20), "over 4,194,304 bytes; expected requests of a run"),
        ("[" * 10_000, "not JSON"),
        ("[1]", "[1]; expected a JSON object"),
        ("{}", "ttft_ms is missing"),
        ({"ttft_ms": "soon"}, "ttft_ms is 'soon'; input should be a valid number"),
        ({"ttft_ms": True}, "ttft_ms is True"),
        ({"ttft_ms": -1}, "ttft_ms is -1"),
        ({"ttft_ms": 10**400}, "ttft_ms is 1000"),
        ({"ttft_ms": float("inf")}, "ttft_ms is inf; input should be"),
        ({"error": 7}, "error is 7; input should be a valid string"),
    ],
)
def test_a_damaged_line_is_refused_with_its_number(tmp_path: Path, line: str | dict[str, Any], message: str) -> None:
    write_run(tmp_path, [10.0, 20.0, 30.0])
    path = tmp_path / "requests.jsonl"
    text = path.read_text().splitlines()
    text[1] = line if isinstance(line, str) else json.dumps({**json.loads(text[1]), **line})
    path.write_text("\n".join(text) + "\n")
    with pytest.raises(InputError) as caught:
        read_requests(path)
    assert str(caught.value).startswith(f"{path}, line 2: {message}")
    assert len(str(caught.value)) < len(str(path)) + 250
    path.write_bytes(b'\n\n{"id": "\xff"}\n')
    with pytest.raises(ReportError, match=r"requests\.jsonl, line 3: not JSON"):
        read_requests(path)


# --- Plots of latencies show the figures of the runs: points, bars and ticks worked out by hand.


def points(panel: Axes) -> list[list[tuple[float, float]]]:
    return [[(float(x), float(y)) for x, y in np.asarray(line.get_xydata())] for line in panel.lines]


def titles(axes: list[Axes]) -> list[str]:
    return [panel.get_title(loc="left") or panel.get_title() for panel in axes]


def test_a_curve_is_the_fraction_of_requests_slower_than_a_ttft() -> None:
    slow, fast = saved_cell("gorgo", [400.0, 100.0], [200.0, 200.0]), saved_cell("random", [30.0, 0.0, 10.0])
    loads = {2.0: [slow, p95_cell("nearest", 1.0), saved_cell("floor", [5.0])], 1.0: [fast]}
    figure = tail_plot(comparison(loads), tail_points(comparison(loads)))
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


def test_a_tail_against_the_load_has_means_and_the_range_of_its_seeds() -> None:
    loads = {
        4.0: [p95_cell("gorgo", 100.0, 200.0, 300.0), p95_cell("random", 1000.0), p95_cell("nearest", None)],
        1.0: [p95_cell("gorgo", 500.0, None, 1500.0)],
    }
    found = comparison(loads)
    figure = load_plot(found, load_points(found))
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
    figure = tail_plot(found, tail_points(found), NARROW)
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
def tuning_generation(
    number: int, weight: float, objective_ms: float | None, *, accepted: bool, best_ms: float | None = None
) -> ReportGeneration:
    sigma = None if number == 1 else 0.5 / (number + 1)
    return ReportGeneration(number, {"w": weight}, sigma, objective_ms, best_ms, accepted, None)


def test_a_tuning_plot_has_candidates_and_effective_weights() -> None:
    figure = tuning_plot(
        [
            tuning_generation(0, 1.0, 100.0, accepted=True, best_ms=100.0),
            tuning_generation(1, 3.0, None, accepted=False),
            tuning_generation(2, 2.0, 80.0, accepted=True, best_ms=90.0),
            tuning_generation(3, 4.0, 200.0, accepted=False, best_ms=90.0),
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
    figure = tuning_plot(
        [tuning_generation(number, value, None, accepted=False) for number, value in enumerate(values)]
    )
    assert figure.axes[0].get_yscale() == scale
    assert [len(panel.lines) for panel in figure.axes] == [1, 1, 0]


def test_eight_weights_have_a_panel() -> None:
    weights = {f"w{number}": 1.0 for number in range(9)}
    assert len(tuning_plot([ReportGeneration(0, weights, None, None, None, True, None)]).axes) == 10


def test_the_generations_are_a_file_with_a_column_per_weight() -> None:
    rows = [
        ReportGeneration(7, {"a": 0.5}, 0.25, 1234.5, None, True, "better, by far"),
        tuning_generation(8, 2.0, 1.0, accepted=False),
    ]
    assert tuning_csv(rows) == (
        "generation,a,w,sigma,objective_ms,incumbent_objective_ms,decision,reason\n"
        '7,0.5,,0.25,1234.5,,accepted,"better, by far"\n'
        "8,,2,0.0555556,1,,rejected,\n"
    )


# --- The points of plots, and the files of them: shares, groups and ratios worked out by hand.


def table(key: str, points: Sequence[PlotPoint]) -> list[dict[str, str]]:
    (kind,) = (one for one in PLOTS if one.key == key)
    return list(csv.DictReader(io.StringIO(kind.csv(points))))


def test_a_ratio_names_its_baseline_and_has_its_interval() -> None:
    cells = [p95_cell("gorgo", 100.0, 350.0), p95_cell("prefix-cache", 200.0, 200.0), p95_cell("random", 50.0)]
    found = comparison({2.0: cells, 1.0: [p95_cell("gorgo", 100.0)]})
    points = ratio_points(found)
    rows = table("ratio", points)
    assert [(one["measure"], one["policy"], one["baseline"], one["runs"]) for one in rows] == [
        (f"p95 {name} / best baseline", policy, "prefix-cache", runs)
        for name in ("TTFT", "E2E")
        for policy, runs in (("gorgo", "2"), ("random", "1"))
    ]
    gorgo, random = rows[:2]
    assert float(gorgo["ratio"]) == pytest.approx(0.9354, abs=1e-4)
    assert float(gorgo["interval_high"]) == pytest.approx(2675.89)
    assert (random["ratio"], random["interval_low"], random["interval_high"]) == ("0.25", "", "")
    figure = ratio_plot(found, points)
    assert [panel.get_yscale() for panel in figure.axes] == ["log"] * 2
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["0.5"]
    low, high = figure.axes[0].get_ylim()
    assert 0.1 < low < 0.25  # the least ratio
    assert 1.25 < high < 3  # not the interval of two runs, up to 2,676


def test_the_p95_of_the_tail_is_the_p95_of_the_load_plot() -> None:
    runs = [np.random.default_rng(seed).lognormal(6, 1, 300) for seed in range(3)]
    values = [one.tolist() for one in runs]
    one = cell(*(row(each_ms=each_ms) for each_ms in values), ttft_ms=values)
    found = comparison({2.0: [one], 1.0: [one]})
    point = load_points(found)[0]
    at_5_percent = next(tail.x for tail in tail_points(found) if tail.value == 0.05)
    assert at_5_percent == pytest.approx(point.value)
    figure = tail_plot(found, tail_points(found))
    figure.draw_without_rendering()
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["100%", "50%", "20%", "10%", "5%", "2%", "1%", "0.5%", "0.2%", "0.1%"]


# runs
def test_a_ratio_is_a_geometric_mean_over_seeds_with_student_s_interval() -> None:
    found = ratio(p95_cell("a", 100.0, 110.0, 90.0), p95_cell("b", 200.0, 200.0, 200.0), ttft_ms_p95)
    logs = np.log([0.5, 0.55, 0.45])
    half = 4.303 * np.std(logs, ddof=1) / np.sqrt(3)  # t at 97.5 % with 2 degrees of freedom
    assert found is not None
    assert found.value == pytest.approx(exp(logs.mean()))
    assert (found.low, found.high) == pytest.approx((exp(logs.mean() - half), exp(logs.mean() + half)))


def test_seeds_that_only_one_side_has_do_not_count() -> None:
    found = ratio(p95_cell("a", 100.0, None, 90.0), p95_cell("b", 200.0, 50.0), ttft_ms_p95)
    assert found is not None
    assert (found.n, found.value, found.low) == (1, 0.5, None)
    assert ratio(p95_cell("a", None), p95_cell("b", 1.0), ttft_ms_p95) is None


def test_the_inverse_ratio_is_the_reciprocal() -> None:
    a, b = p95_cell("a", 100.0, 130.0), p95_cell("b", 90.0, 200.0)
    there, back = ratio(a, b, ttft_ms_p95), ratio(b, a, ttft_ms_p95)
    assert there is not None
    assert back is not None
    assert log(there.value) == pytest.approx(-log(back.value))


def test_the_best_baseline_is_one_of_the_paper_s_four() -> None:
    figures = {"random": 1.0, "least-load": 30.0, "prefix-cache": 20.0, "least-request": None, "gorgo": 10.0}
    points = ratio_points(comparison({1.0: [p95_cell(policy, value) for policy, value in figures.items()]}))
    assert {point.to for point in points} == {"prefix-cache"}
    assert ratio_points(comparison({1.0: [p95_cell("gorgo", 1.0)]})) == []


def test_unknown_runs_do_not_lower_a_mean() -> None:
    assert ttft_ms_p95(p95_cell("a", 100.0, None, 200.0).mean) == 150.0
    assert ttft_ms_p95(p95_cell("a", None).mean) is None


def test_a_quantile_of_several_runs_is_the_mean_of_theirs() -> None:
    points = tail_points(comparison({1.0: [saved_cell("gorgo", [100.0, 300.0], [], [500.0, 700.0])]}))
    assert [(point.value, point.x) for point in points if point.value in (1.0, 0.5)] == [(1.0, 300.0), (0.5, 400.0)]
    assert {point.runs for point in points} == {2}
