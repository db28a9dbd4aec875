"""What is read of result files: every key, and what lies at a bound or just beyond it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gorgo.apps.report import reading
from gorgo.apps.report import requests as columns
from gorgo.apps.report.find import find_results
from gorgo.apps.report.requests import read_requests
from gorgo.apps.report.rows import read_history, read_results
from gorgo.apps.report.runs import ReportGeneration, Run, compare, weights_words
from gorgo.apps.results import Spread, write_results
from gorgo.errors import ReportError
from tests.apps.report.made import generation, records, row, write_run

#: Every key another value.
FULL = row(
    records([1.0]),
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
    (folder / "results.json").write_text(json.dumps([{**FULL.as_json(), **changes}]))
    return folder / "results.json"


def test_a_row_is_read_as_it_was_written(tmp_path: Path) -> None:
    unknown = replace(FULL, policy=None, weights=None, cache_hit=None, ttft_ms=Spread(), slip_ms_p95=None)
    write_results(tmp_path, [FULL, unknown])
    assert read_results(tmp_path / "results.json") == [FULL, unknown]


@pytest.mark.parametrize(
    "changes",
    [
        {"cache_hit": 0},
        {"cache_hit": 1},
        {"seed": 0},
        {"n": 2**53},
        {"cache_hit_estimated": -(2**53)},
        {"time_scale": 1e-9},
        {"ttft_ms": {"mean": 0, "p50": 0, "p95": None, "p99": 0}},
        {"weights": {}},
        {"a key of tomorrow": []},
    ],
)
def test_what_lies_at_a_bound_is_read(tmp_path: Path, changes: dict[str, Any]) -> None:
    (found,) = read_results(with_key(tmp_path, **changes))
    assert found.as_json() | changes == {**FULL.as_json(), **changes}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cache_hit": 1.001}, "cache_hit is 1.001; expected a fraction"),
        ({"cache_hit": -0.001}, "cache_hit is -0.001; expected a fraction"),
        ({"n": 2**53 + 2}, "n is 9007199254740994; expected a whole number"),
        ({"cache_hit_estimated": -(2**53) - 2}, "cache_hit_estimated is -9007199254740994"),
        ({"errors": -1}, "errors is -1; expected a whole number, at least 0"),
        ({"time_scale": -1}, "time_scale is -1; expected a number greater than 0"),
        ({"time_scale": True}, "time_scale is true; expected a number"),
        ({"time_scale": None}, "time_scale is null; expected a number"),
        (
            {"itl_ms": {"mean": 1, "p50": 1, "p95": 1, "p99": -1}},
            "row 1, itl_ms: p99 is -1; expected a number, at least 0",
        ),
        ({"prediction_error_ms": {"mean": 1, "p50": -1, "p95": 1}}, "prediction_error_ms: p50 is -1"),
        ({"weights": {"a": None}}, "row 1, weights: a is null; expected a number"),
        ({"policy": 7}, "policy is 7; expected a text or null"),
        # Sixty characters are shown whole, more are cut.
        ({"source": "x" * 58}, f'source is "{"x" * 58}"; expected one of simulated, live'),
        ({"source": "x" * 59}, f'source is "{"x" * 56}...; expected one of simulated, live'),
    ],
)
def test_what_lies_beyond_a_bound_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ReportError) as caught:
        read_results(with_key(tmp_path, **changes))
    assert said in str(caught.value)


def test_a_file_larger_than_any_of_this_program_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = with_key(tmp_path)
    monkeypatch.setattr(reading, "MAX_BYTES", path.stat().st_size)
    assert read_results(path) == [FULL]
    monkeypatch.setattr(reading, "MAX_BYTES", path.stat().st_size - 1)
    with pytest.raises(ReportError, match="larger than 0 MB"):
        read_results(path)


def test_a_history_is_read_as_a_list_or_under_its_key(tmp_path: Path) -> None:
    rows = [
        generation(3, objective_ms=None, sigma=None, accepted=False, reason=None),
        generation(4, weights={"w": 1}, sigma=0.25, objective_ms=5, incumbent_objective_ms=6),
    ]
    wanted = (
        ReportGeneration(3, {"w_rtt": 0.5, "w_queue": 0.1}, None, None, 1000.0, False, ""),
        ReportGeneration(4, {"w": 1.0}, 0.25, 5.0, 6.0, True, "lower p95 TTFT"),
    )
    for number, text in enumerate((rows, {"generations": rows})):
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(text))
        assert read_history(path) == wanted
    (tmp_path / "other.json").write_text('{"other": []}')
    with pytest.raises(ReportError, match=r"other\.json: null; expected a list of objects"):
        read_history(tmp_path / "other.json")


# -- requests


def lines(path: Path, *changes: dict[str, Any]) -> Path:
    made = [record.as_json() | change for record, change in zip(records([1.0] * len(changes)), changes, strict=True)]
    path.write_text("".join(json.dumps(line) + "\n" for line in made))
    return path


def test_columns_are_in_the_order_of_the_lines_and_a_failed_request_has_no_latency(tmp_path: Path) -> None:
    found = read_requests(
        lines(
            tmp_path / "requests.jsonl",
            {"scheduled_s": 7, "ttft_ms": 0, "e2e_s": 2**53, "predicted_ttft_ms": 4, "rtt_ms": 5, "replica": "b"},
            {
                "scheduled_s": 3,
                "ttft_ms": 6,
                "e2e_s": 8,
                "predicted_ttft_ms": 9,
                "replica": "a",
                "error": "timeout: 1 s",
            },
            {"scheduled_s": None, "replica": "b", "region": "west", "ttft_ms": None},
            {"scheduled_s": 1, "replica": None, "error": "refused"},
        )
    )
    assert len(found) == 4
    np.testing.assert_array_equal(found.scheduled_s, [7.0, 3.0, np.nan, 1.0])
    np.testing.assert_array_equal(found.ttft_ms, [0.0, np.nan, np.nan, np.nan])
    np.testing.assert_array_equal(found.e2e_s, [2.0**53, np.nan, 0.01, np.nan])
    np.testing.assert_array_equal(found.predicted_ttft_ms, [4.0, 9.0, np.nan, np.nan])
    np.testing.assert_array_equal(found.rtt_ms, [5.0, np.nan, np.nan, np.nan])
    assert (found.replicas, found.replica.tolist()) == (("b", "a"), [0, 1, 0, -1])
    assert found.regions == {"b": "west", "a": "eu"}
    assert found.errors == {"timeout": 1, "refused": 1}


def test_twenty_kinds_of_errors_are_told_apart(tmp_path: Path) -> None:
    kinds = [f"e{number}" for number in range(22)]
    found = read_requests(lines(tmp_path / "requests.jsonl", *({"error": kind} for kind in [*kinds, "e0", "e21"])))
    assert found.errors == {"e0": 2} | dict.fromkeys(kinds[1:20], 1) | {"other": 3}


def test_replicas_of_one_file_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "MAX_REPLICAS", 2)
    path = lines(tmp_path / "requests.jsonl", {"replica": "a"}, {"replica": "b"}, {"replica": "a"}, {"replica": "c"})
    with pytest.raises(ReportError, match="line 4: more than 2 replicas"):
        read_requests(path)


def test_progress_is_told_now_and_then_and_adds_up_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = lines(tmp_path / "requests.jsonl", *({"id": "same"} for _ in range(5)))
    size = path.stat().st_size
    monkeypatch.setattr(columns, "SAY_EVERY_BYTES", 2 * size // 5 - 1)
    told: list[int] = []
    read_requests(path, told.append)
    # Lines are of almost one size: after two of them there is something to tell, and the rest at the end.
    assert (len(told), sum(told)) == (3, size)
    assert told[0] > told[2] > 0


@pytest.mark.parametrize("blank", ["\n", "  \n"])
def test_blank_lines_are_no_requests_and_count_as_lines(tmp_path: Path, blank: str) -> None:
    path = lines(tmp_path / "requests.jsonl", {})
    path.write_text(blank + path.read_text() + blank)
    assert len(read_requests(path)) == 1
    path.write_text(blank + "[]\n")
    with pytest.raises(ReportError, match="line 2: "):
        read_requests(path)


# -- what belongs together


def test_loads_go_from_the_lowest_to_the_highest_and_seeds_are_paired_by_repetition() -> None:
    runs = [
        Run(row(records([1.0]), policy, time_scale=time_scale, seed=seed))
        for time_scale, policy, seed in (
            (1.0, "zebra", 0),
            (2.0, "floor", 1),
            (2.0, "random", 1),
            (2.0, "random", 0),
            (2.0, "random", 1),
            (2.0, "gorgo", 0),
            (2.0, None, 0),
        )
    ]
    (found,) = compare(runs, order=["gorgo", "random"])
    assert list(found.loads) == [2.0, 1.0]
    assert [cell.label for cell in found.loads[2.0]] == ["gorgo", "random", "unnamed policy", "floor"]
    assert [run.pair for run in found.loads[2.0][1].runs] == [(1, 0), (0, 0), (1, 1)]
    assert [cell.label for cell in found.contenders(2.0)] == ["gorgo", "random", "unnamed policy"]
    # Those of all loads by first appearance, and the yardsticks behind.
    assert found.labels == ["gorgo", "random", "unnamed policy", "zebra", "floor"]
    assert (found.simulated, found.source) == (True, "simulated")


def test_traces_and_sources_are_compared_apart_in_the_order_of_their_names() -> None:
    runs = [
        Run(row(records([1.0]), trace=trace, source=source))
        for trace, source in (("b", "live"), ("a", "simulated"), ("a", "live"))
    ]
    assert [(one.trace, one.source) for one in compare(runs, order=[])] == [
        ("a", "live"),
        ("a", "simulated"),
        ("b", "live"),
    ]


def test_weights_are_told_in_words() -> None:
    assert weights_words({"w_rtt": 0.5, "w_queue": 2.0}) == "w_rtt 0.5, w_queue 2"
    assert weights_words(None) == weights_words({}) == "weights not told"


def test_equal_rows_above_one_another_are_one_run_and_different_ones_are_two(tmp_path: Path) -> None:
    deep = write_run(tmp_path / "a" / "b", records([10.0, 20.0]))
    write_results(tmp_path / "a", [deep, replace(deep, seed=7)])
    write_results(tmp_path, [deep])
    (found,) = find_results(tmp_path).comparisons
    (cell,) = found.cells
    assert [(run.row.seed, run.requests is not None) for run in cell.runs] == [(0, True), (7, False)]
