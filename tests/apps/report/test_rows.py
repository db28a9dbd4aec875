"""Result files are read as they were written; a damaged one is refused with the place of the fault."""

from __future__ import annotations

import json
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import pytest

from gorgo.apps.report import rows
from gorgo.apps.report.rows import read_history, read_requests, read_results
from gorgo.apps.report.runs import ReportGeneration
from gorgo.apps.results import Spread, write_results
from gorgo.errors import ReportError
from tests.apps.report.builders import generation, records, row, write_run

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
    assert read_results(tmp_path / "results.json") == [FULL, unknown, replace(odd, trace="caf\\udce9")]
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
        ({"time_scale": True}, "time_scale is true; input should be a valid number"),
        ({"time_scale": "2"}, 'time_scale is "2"; input should be a valid number'),
        ({"ttft_ms": {"mean": -1}}, "ttft_ms.mean is -1; input should be greater than or equal to 0"),
        ({"itl_ms": 3}, "itl_ms is 3; expected a JSON object"),
        ({"weights": {"a": None}}, "weights.a is null; input should be a valid number"),
        ({"share": None}, "share is null; input should be a valid"),
        ({"policy": 7}, "policy is 7; input should be a valid string"),
        # Sixty characters are shown whole, more are cut.
        ({"source": "x" * 58}, f'source is "{"x" * 58}"; input should be'),
        ({"source": "x" * 59}, f'source is "{"x" * 56}...; input should be'),
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
        (b"[\n{", ", line 2: not JSON (Expecting property name"),
        (b'["\n\xff"]', ", line 2: not UTF-8"),
        (b"[NaN]", ", line 1: not JSON (NaN is not JSON)"),
        (b"[" * 100_000, ", line 1: not JSON"),
        (b"3", ": 3; expected a list of objects"),
        (b'{"a": 1}', ': {"a": 1}; expected a list of objects'),
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
    monkeypatch.setattr(rows, "MAX_BYTES", path.stat().st_size)
    assert len(read_results(path)) == 2
    monkeypatch.setattr(rows, "MAX_BYTES", path.stat().st_size - 1)
    with pytest.raises(ReportError, match="larger than 0 MB"):
        read_results(path)


def test_a_history_is_read_as_a_list_or_as_the_command_prints_it(tmp_path: Path) -> None:
    entries = [
        generation(3, objective_ms=None, sigma=None, accepted=False, reason=None),
        generation(4, weights={"w": 1}, sigma=0.25, objective_ms=5, incumbent_objective_ms=6),
    ]
    for value in (entries, {"generations": entries}):
        (tmp_path / "history.json").write_text(json.dumps(value))
        assert read_history(tmp_path / "history.json") == (
            ReportGeneration(3, {"w_rtt": 0.5, "w_queue": 0.1}, None, None, 1000.0, False, None),
            ReportGeneration(4, {"w": 1.0}, 0.25, 5.0, 6.0, True, "lower p95 TTFT"),
        )


@pytest.mark.parametrize("change", [{"accepted": 1}, {"weights": None}, {"sigma": "big"}, {"number": -1}])
def test_a_damaged_history_is_refused_with_its_generation(tmp_path: Path, change: dict[str, Any]) -> None:
    (tmp_path / "history.json").write_text(json.dumps([generation(0), {**generation(1), **change}]))
    with pytest.raises(ReportError, match=f"history.json, generation 2: {next(iter(change))} is "):
        read_history(tmp_path / "history.json")


def lines(path: Path, *changes: dict[str, Any]) -> Path:
    made = [record.as_json() | change for record, change in zip(records([1.0] * len(changes)), changes, strict=True)]
    path.write_text("".join(json.dumps(line) + "\n\n" for line in made))
    return path


def test_latencies_are_of_requests_that_succeeded_and_errors_are_counted_by_kind(tmp_path: Path) -> None:
    given = ({"ttft_ms": 0}, {"ttft_ms": None}, {"error": "timeout: 1 s"}, {"error": "caf\udce9"}, {"ttft_ms": 2**53})
    found = read_requests(lines(tmp_path / "requests.jsonl", *given))
    assert (found.count, found.ttft_ms.tolist()) == (5, [0.0, 2.0**53])
    assert found.errors == {"no answer in time": 1, "caf\udce9": 1}


def test_regions_and_prompt_lengths_belong_to_the_latencies(tmp_path: Path) -> None:
    given: tuple[dict[str, Any], ...] = (
        {"region": "eu", "input_tokens": 7},
        {"error": "timeout"},
        {"region": None, "input_tokens": None},
        {},
    )
    found = read_requests(lines(tmp_path / "requests.jsonl", *given))
    assert found.region.tolist() == ["eu", "", "us"]
    assert found.input_tokens.tolist() == [7.0, pytest.approx(nan, nan_ok=True), 1000.0]


def test_thirty_two_regions_are_told_apart(tmp_path: Path) -> None:
    given = [{"region": f"r{number}"} for number in [*range(34), 0, 33]]
    found = read_requests(lines(tmp_path / "requests.jsonl", *given))
    assert found.region.tolist() == [*(f"r{number}" for number in range(32)), "other", "other", "r0", "other"]


def test_twenty_kinds_of_errors_are_counted_separately(tmp_path: Path) -> None:
    kinds = [f"e{number}" for number in range(22)]
    found = read_requests(lines(tmp_path / "requests.jsonl", *({"error": kind} for kind in [*kinds, "e0", "e21"])))
    assert found.errors == {"e0": 2} | dict.fromkeys(kinds[1:20], 1) | {"other": 3}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": ', "not JSON"),
        ("\xff", "not JSON"),
        ("x" * 100_000, "not JSON"),
        ("[" * 10_000, "not JSON"),
        ("[1]", "[1]; expected a JSON object"),
        ("{}", "ttft_ms is missing"),
        ({"ttft_ms": "soon"}, 'ttft_ms is "soon"; input should be a valid number'),
        ({"ttft_ms": True}, "ttft_ms is true"),
        ({"ttft_ms": -1}, "ttft_ms is -1"),
        ({"ttft_ms": 10**400}, "ttft_ms is 1000"),
        ({"ttft_ms": float("inf")}, "not JSON (Infinity is not JSON)"),
        ({"error": 7}, "error is 7; input should be a valid string"),
    ],
)
def test_a_damaged_line_is_refused_with_its_number(tmp_path: Path, line: str | dict[str, Any], message: str) -> None:
    write_run(tmp_path, [10.0, 20.0, 30.0])
    path = tmp_path / "requests.jsonl"
    text = path.read_text().splitlines()
    text[1] = line if isinstance(line, str) else json.dumps({**json.loads(text[1]), **line})
    path.write_text("\n".join(text) + "\n")
    with pytest.raises(ReportError) as caught:
        read_requests(path)
    assert str(caught.value).startswith(f"{path}, line 2: {message}")
    assert len(str(caught.value)) < len(str(path)) + 250
    path.write_bytes(b'\n\n{"id": "\xff"}\n')
    with pytest.raises(ReportError, match=r"requests\.jsonl, line 3: not UTF-8"):
        read_requests(path)
