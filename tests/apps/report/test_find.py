"""Which files of a folder belong together, and which are left out."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from gorgo.apps.report.find import find_results
from gorgo.apps.report.runs import format_weights
from gorgo.apps.results import write_results
from gorgo.errors import ReportError
from tests.apps.report.builders import generation, row, write_run


def refusal(folder: Path) -> str:
    with pytest.raises(ReportError) as caught:
        find_results(folder)
    return str(caught.value)


def test_rows_that_a_demo_writes_twice_count_once_and_keep_their_requests(tmp_path: Path) -> None:
    rows = [write_run(tmp_path / name, [10.0, 20.0], name, source="live") for name in ("gorgo", "random")]
    write_results(tmp_path, [*rows, replace(rows[0], seed=7)])
    (comparison,) = find_results(tmp_path).comparisons
    runs = [[(run.row.seed, run.requests is not None) for run in cell.runs] for cell in comparison.cells]
    assert (comparison.labels, runs) == (["gorgo", "random"], [[(0, True), (7, False)], [(0, True)]])


def test_equal_rows_in_folders_side_by_side_are_two_runs(tmp_path: Path) -> None:
    for name in ("first", "second"):
        write_run(tmp_path / name, [10.0, 20.0])
    (comparison,) = find_results(tmp_path).comparisons
    assert [run.pair for run in comparison.cells[0].runs] == [(0, 0), (0, 1)]


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
    assert list(comparison.loads) == [2.0, 1.0]
    assert comparison.labels == ["gorgo", "random", "unnamed policy", "zebra", "oracle"]
    assert [cell.label for cell in comparison.loads[1.0]] == comparison.labels


def test_requests_without_a_row_are_left_out_with_the_reason(tmp_path: Path) -> None:
    write_run(tmp_path / "ended", [10.0])
    write_run(tmp_path / "not", [10.0])
    (tmp_path / "not" / "results.json").unlink()
    write_run(tmp_path / "two", [10.0])
    write_results(tmp_path / "two", [row("random"), row("gorgo")])
    assert find_results(tmp_path).left_out == (
        f"{tmp_path}/two/requests.jsonl: belongs to no row, because the results.json beside it has 2",
        f"{tmp_path}/not/requests.jsonl: no results.json beside it: the run did not end",
    )


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
def test_a_pipe_is_refused_instead_of_read(tmp_path: Path, name: str) -> None:
    write_results(tmp_path / "good", [row()])
    (tmp_path / "bad").mkdir()
    os.mkfifo(tmp_path / "bad" / name)
    assert refusal(tmp_path) == f"{tmp_path}/bad/{name}: no regular file; expected one that --out DIR wrote"
