"""What is found in a folder, what belongs together, and what is said of files that are damaged."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gorgo.apps.report.find import find_results
from gorgo.apps.results import write_results
from gorgo.errors import ReportError
from tests.apps.report.made import generation, records, row, write_run


def refused(folder: Path) -> str:
    with pytest.raises(ReportError) as caught:
        find_results(folder)
    return str(caught.value)


def test_rows_that_a_demo_writes_twice_count_once_and_keep_their_requests(tmp_path: Path) -> None:
    rows = [write_run(tmp_path / name, records([10.0, 20.0]), name, source="live") for name in ("gorgo", "random")]
    write_results(tmp_path, rows)
    (comparison,) = find_results(tmp_path).comparisons
    assert comparison.labels == ["gorgo", "random"]
    assert [len(cell.runs) for cell in comparison.cells] == [1, 1]
    assert all(run.requests is not None for cell in comparison.cells for run in cell.runs)


def test_equal_rows_in_folders_side_by_side_are_two_runs(tmp_path: Path) -> None:
    for name in ("first", "second"):
        write_run(tmp_path / name, records([10.0, 20.0]))
    (comparison,) = find_results(tmp_path).comparisons
    assert [run.pair for run in comparison.cells[0].runs] == [(0, 0), (0, 1)]


def test_simulated_and_live_rows_never_share_a_table(tmp_path: Path) -> None:
    write_run(tmp_path / "a", records([10.0]), source="live")
    write_run(tmp_path / "b", records([10.0]), source="simulated")
    assert [one.source for one in find_results(tmp_path).comparisons] == ["live", "simulated"]


def test_one_policy_with_two_weight_sets_has_two_names(tmp_path: Path) -> None:
    write_results(tmp_path, [row(records([1.0]), weights={"w_rtt": weight}) for weight in (0.5, 1.0)])
    assert find_results(tmp_path).comparisons[0].labels == ["gorgo (w_rtt 0.5)", "gorgo (w_rtt 1)"]


def test_policies_stand_in_the_readme_s_order_and_yardsticks_last(tmp_path: Path) -> None:
    names = ("zebra", "oracle", "random", "gorgo")
    write_results(tmp_path, [row(records([1.0]), name) for name in names])
    assert find_results(tmp_path).comparisons[0].labels == ["gorgo", "random", "zebra", "oracle"]


def test_columns_are_the_records(tmp_path: Path) -> None:
    failed = records([5.0], error="timeout: 120 s", replica=None, region=None)
    write_run(tmp_path, [*records([10.0, 20.0], predicted_ttft_ms=11.0), *failed])
    requests = find_results(tmp_path).comparisons[0].cells[0].runs[0].requests
    assert requests is not None
    np.testing.assert_array_equal(requests.ttft_ms, [10.0, 20.0, np.nan])  # a failed request has no latency
    np.testing.assert_array_equal(requests.predicted_ttft_ms, [11.0, 11.0, np.nan])
    assert [requests.replicas[n] if n >= 0 else None for n in requests.replica] == ["us-0", "eu-0", None]
    assert requests.regions == {"us-0": "us", "eu-0": "eu"}
    assert requests.errors == {"timeout": 1}


def test_a_run_that_did_not_end_is_named_and_left_out(tmp_path: Path) -> None:
    write_run(tmp_path / "ended", records([10.0]))
    write_run(tmp_path / "not", records([10.0]))
    (tmp_path / "not" / "results.json").unlink()
    found = find_results(tmp_path)
    assert found.left_out == (f"{tmp_path}/not/requests.jsonl: no results.json beside it, so the run did not end",)


def test_requests_beside_several_rows_belong_to_none(tmp_path: Path) -> None:
    write_run(tmp_path, records([10.0]))
    write_results(tmp_path, [row(records([10.0]), name) for name in ("gorgo", "random")])
    found = find_results(tmp_path)
    assert "2 rows in the results.json beside it" in found.left_out[0]
    assert all(run.requests is None for cell in found.comparisons[0].cells for run in cell.runs)


def test_a_folder_without_results_says_what_was_expected(tmp_path: Path) -> None:
    assert (
        refused(tmp_path)
        == f"{tmp_path}: no results.json and no history.json in it or below; expected what --out DIR wrote"
    )
    assert refused(tmp_path / "none") == f"{tmp_path}/none: no such folder"
    (tmp_path / "file").touch()
    assert refused(tmp_path / "file") == f"{tmp_path}/file: not a folder"


def test_history_alone_is_enough(tmp_path: Path) -> None:
    (tmp_path / "history.json").write_text(json.dumps([generation(0)]))
    ((path, generations),) = find_results(tmp_path).histories.items()
    assert (path, generations[0].objective_ms) == ("history.json", 900.0)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": ', "is not JSON"),
        ("[1]", "[1]; expected a JSON object"),
        ('{"id": NaN}', "NaN is not JSON"),
        ("{}", "scheduled_s is missing; expected a number from 0 or null"),
        ("\xff", "is not JSON"),
        ({"ttft_ms": "soon"}, 'ttft_ms is "soon"; expected a number from 0 or null'),
        ({"ttft_ms": True}, "ttft_ms is true"),
        ({"ttft_ms": -1}, "ttft_ms is -1"),
        ({"e2e_s": 10**400}, "e2e_s is 1000"),
        ({"rtt_ms": []}, "rtt_ms is []"),
        ({"replica": 7}, "replica is 7; expected a text or null"),
        ("x" * 100_000, "is not JSON"),
    ],
)
def test_a_damaged_line_is_told_with_file_line_and_expectation(
    tmp_path: Path, line: str | dict[str, Any], message: str
) -> None:
    write_run(tmp_path, records([10.0, 20.0, 30.0]))
    path = tmp_path / "requests.jsonl"
    lines = path.read_text().splitlines()
    lines[1] = line if isinstance(line, str) else json.dumps({**json.loads(lines[1]), **line})
    path.write_text("\n".join(lines) + "\n")
    told = refused(tmp_path)
    assert told.startswith(f"{path}, line 2: ")
    assert message in told
    assert len(told) < len(str(path)) + 250


def test_bytes_that_are_not_utf_8_are_told_with_their_line(tmp_path: Path) -> None:
    write_run(tmp_path, records([10.0]))
    (tmp_path / "requests.jsonl").write_bytes(b'\n{"id": "\xff"}\n')
    assert "requests.jsonl, line 2: not UTF-8" in refused(tmp_path)


def test_requests_of_another_run_are_refused(tmp_path: Path) -> None:
    write_run(tmp_path, records([10.0, 20.0]))
    write_results(tmp_path, [row(records([10.0]))])
    assert "2 lines, but n is 1 in results.json: they are not of the same run" in refused(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"time_scale": 0}, "row 1: time_scale is 0.0; expected a number greater than 0"),
        ({"source": "dreamt"}, 'source is "dreamt"; expected one of simulated, live'),
        ({"n": 1.5}, "n is 1.5; expected a whole number"),
        ({"ttft_ms": {"p50": 1}}, "row 1, ttft_ms: mean is missing"),
        ({"ttft_ms": {"mean": -1, "p50": 1, "p95": 1, "p99": 1}}, "ttft_ms: mean is -1"),
        ({"cache_hit": 50}, "cache_hit is 50; expected a fraction from 0 to 1"),
        ({"share": None}, "share is null; expected an object"),
        ({"trace": None}, "trace is null; expected a text"),
    ],
)
def test_a_wrong_row_is_told_with_its_key_and_expectation(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    good = row(records([10.0])).as_json()
    (tmp_path / "results.json").write_text(json.dumps([{**good, **change}]))
    assert message.replace("0.0", "0") in refused(tmp_path).replace("0.0", "0")


@pytest.mark.parametrize(
    ("text", "message"), [("[\n{", "line 2: not JSON"), ("3", "expected a list"), ("[3]", "row 1: 3;")]
)
def test_a_damaged_results_file_is_told(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "results.json").write_text(text)
    assert message in refused(tmp_path)


@pytest.mark.parametrize("change", [{"accepted": "yes"}, {"weights": None}, {"sigma": "big"}, {"number": -1}])
def test_a_damaged_history_is_told(tmp_path: Path, change: dict[str, Any]) -> None:
    (tmp_path / "history.json").write_text(json.dumps([generation(0), {**generation(1), **change}]))
    assert f"history.json, generation 2: {next(iter(change))} is " in refused(tmp_path)


@pytest.mark.parametrize("name", ["results.json", "requests.jsonl", "history.json"])
def test_what_is_no_file_is_not_waited_for(tmp_path: Path, name: str) -> None:
    write_results(tmp_path / "good", [row(records([1.0]))])
    (tmp_path / "bad").mkdir()
    os.mkfifo(tmp_path / "bad" / name)
    assert refused(tmp_path) == f"{tmp_path}/bad/{name}: no regular file; expected one that --out DIR wrote"
