"""`gorgo report` on the command line."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gorgo.cli import app
from gorgo.errors import ReportError
from gorgo.lab.report import report
from gorgo.lab.report.report import find_results, read_history, read_requests, read_results
from gorgo.lab.report.runs import TTFT_P95, ReportGeneration, format_weights, mean, ratio
from gorgo.lab.results import Spread, write_results
from gorgo.lab.simulate.compare import Ratio, ratio_of_rows, ttft_ms_p95
from tests.lab.report.builders import generation, records, row, write_run

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
    assert [[requests.count for requests in cell.requests] for cell in comparison.cells] == [[20]] * 5
    assert all(len(cell.ttft_ms) for cell in comparison.cells)
    assert found.left_out == ()


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
    assert "expected a list of objects" in result.stderr


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
    runs = [[(run.row.seed, run.requests is not None) for run in cell.runs] for cell in comparison.cells]
    assert (comparison.labels, runs) == (["gorgo", "random"], [[(0, True), (7, False)], [(0, True)]])


def test_equal_live_rows_in_folders_side_by_side_are_two_runs(tmp_path: Path) -> None:
    for name in ("first", "second"):
        write_run(tmp_path / name, [10.0, 20.0], source="live")
    found = find_results(tmp_path)
    assert [run.pair for run in found.comparisons[0].cells[0].runs] == [(0, 0, None), (0, 1, None)]
    assert found.left_out == ()


@pytest.mark.parametrize("digest", ["0123456789abcdef", None])
def test_copies_of_a_simulated_run_count_once_and_the_page_says_so(tmp_path: Path, digest: str | None) -> None:
    for name in ("first", "second", "third"):
        rows = [row("gorgo", [10.0 + seed], seed=seed, digest=digest and f"{digest}{seed}") for seed in (0, 1)]
        write_results(tmp_path / name, rows)
    found = find_results(tmp_path)
    assert [run.pair for run in found.comparisons[0].cells[0].runs] == [(0, 0, None), (1, 0, None)]
    assert [text.partition(": ")[2] for text in found.left_out] == [
        "2 rows are copies of simulated runs that count already: equal digests count once"
    ] * 2
    assert "2 rows are copies of simulated runs" in report.report(found, [500.0]).html


def test_three_copies_of_a_folder_leave_an_interval_as_wide_as_one(tmp_path: Path) -> None:
    def interval(folder: Path) -> tuple[float | None, float | None]:
        (comparison,) = find_results(folder).comparisons
        gorgo, random = comparison.cells
        found = ratio(gorgo, random, TTFT_P95)
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
    assert [run.row.ttft_ms.p95 for run in found.comparisons[0].cells[0].runs] == [10.0]
    assert ["the code changed between them" in text for text in found.left_out] == [True]


def test_unlike_settings_of_one_trace_are_neither_averaged_nor_paired(tmp_path: Path) -> None:
    for setting, each_ms in (("aa", [10.0]), ("bb", [30.0])):
        rows = [row(policy, each_ms, setting=setting, digest=f"{setting} {policy}") for policy in ("gorgo", "random")]
        write_results(tmp_path / setting, rows)
    found = find_results(tmp_path)
    assert [one.title for one in found.comparisons] == [
        f"small.jsonl, simulated, setting {setting}" for setting in ("aa", "bb")
    ]
    assert [[mean(cell, TTFT_P95) for cell in one.cells] for one in found.comparisons] == [[10.0, 10.0], [30.0, 30.0]]
    assert "neither averaged nor paired" in report.report(found, [500.0]).html


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
    assert found.left_out == ()
    (comparison,) = found.comparisons
    gorgo, random = comparison.cells
    assert len(gorgo.ttft_ms) == 6
    rows = [[run.row for run in cell.runs] for cell in (gorgo, random)]
    assert ratio(gorgo, random, TTFT_P95) == ratio_of_rows(rows[0], rows[1], ttft_ms_p95)
    assert (ratio(gorgo, random, TTFT_P95) or Ratio(0, 0, 0, 0)).n == 3


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
    monkeypatch.setattr(report, "MAX_BYTES", path.stat().st_size)
    assert len(read_results(path)) == 2
    monkeypatch.setattr(report, "MAX_BYTES", path.stat().st_size - 1)
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
