"""The page as a browser gets it: valid, self-contained, the same bytes for the same results."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from typer.testing import CliRunner

from gorgo.cli import app
from gorgo.errors import ReportError
from gorgo.lab.report import plots as plots_module
from gorgo.lab.report import report as page
from gorgo.lab.report import write_report
from gorgo.lab.report.minute import TwinRow, minute_page, slow_minute
from gorgo.lab.report.report import (
    PageTable,
    acceptance_log,
    error_table,
    find_results,
    load_table,
    policies_csv,
    ratio_table,
    share_table,
)
from gorgo.lab.report.runs import Cell, ReportGeneration, Requests, Run
from gorgo.lab.request_log import LoggedRequest, read_logged_requests
from gorgo.lab.results import Spread, write_results
from tests.documents import ROOT
from tests.lab.report.builders import comparison, generation, p95_cell, row, saved_cell, write_run, write_sweep

VOID = {"meta", "link", "br", "hr", "img", "input", "source"}
LOADS = {"gorgo-ms": {2.0: 200, 1.0: 300}, "gorgo": {2.0: 190, 1.0: 400}, "prefix-cache": {2.0: 220, 1.0: 350}}


class Page(HTMLParser):
    """A page whose tags match; its ids, references and table cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.labelled: list[str] = []
        self.cells: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")
            assert tag == "td" or dict(attrs)["scope"] in ("col", "row")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        assert tag not in ("script", "iframe", "object", "link", "img"), tag
        self.ids += [value for name, value in values.items() if name == "id"]
        self.references += [value for name, value in values.items() if name in ("src", "href", "xlink:href")]
        self.references += re.findall(r"url\(([^)]*)\)", " ".join(values.values()))
        if tag == "svg":
            assert values["role"] == "img"
            self.labelled.append(values["aria-labelledby"])

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self.open[-2:]):
            self.cells[-1] += data


def report_of(folder: Path) -> page.ReportPages:
    return page.report(find_results(folder), (500.0,))


def page_of(folder: Path) -> str:
    return report_of(folder).html


def plots(text: str) -> list[str]:
    """The drawn plots of a page, each in two widths."""
    labelled = Page(text).labelled
    assert labelled[1::2] == [one.replace("-title", "-narrow-title") for one in labelled[::2]]
    return [one.removesuffix("-title") for one in labelled[::2]]


@pytest.fixture
def without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of the text alone: a plot takes half a second."""
    monkeypatch.setattr(page, "svg_document", lambda *_, **__: "")
    monkeypatch.setattr(page, "svg_element", lambda *_, **__: "")


def test_a_page_is_valid_and_refers_to_nothing_outside_itself(tmp_path: Path) -> None:
    write_sweep(tmp_path, LOADS)
    (tmp_path / "history.json").write_text(json.dumps([generation(n, sigma=0.5 + n) for n in range(5)]))
    report = report_of(tmp_path)
    text = report.html
    found = Page(text)
    assert plots(text) == [
        "1-p95-against-load",
        "1-ratio",
        "1-slo-against-load",
        "1-ttft-tail",
        "1-ttft-by-prompt-length",
        "2-tuning",
    ]
    assert "Left out: no group has 20 requests of a run." in text  # of a region
    assert len(found.ids) == len(set(found.ids))
    files = {one.removeprefix("report/") for one in found.references if one.startswith("report/")}
    assert files == set(report.files)
    ids = {one.removeprefix("#") for one in found.references if not one.startswith("report/")}
    assert ids <= set(found.ids)
    assert set(found.labelled) <= set(found.ids)
    assert "<title>GORGO report: small.jsonl, simulated; Tuning: history.json</title>" in text
    assert "@import" not in text
    assert re.findall(r'https?://[^"\s<]*', text.replace("http://www.w3.org/", "")) == []
    assert len(text) < 400_000


def test_each_file_is_a_whole_drawing_or_a_table_and_the_same_bytes_again(tmp_path: Path) -> None:
    write_sweep(tmp_path, LOADS)
    report = report_of(tmp_path)
    assert report == report_of(tmp_path)
    for name, text in report.files.items():
        if name.endswith(".svg"):
            root = ElementTree.fromstring(text)
            assert root.tag == "{http://www.w3.org/2000/svg}svg"
            assert "date" not in text
        else:
            header, *rows = csv.reader(text.splitlines())
            assert rows
            assert {len(one) for one in rows} == {len(header)}
    assert {name.removesuffix(".svg") for name in report.files if name.endswith(".svg")} == set(plots(report.html))


def test_a_figure_has_one_value_in_table_plot_and_file(tmp_path: Path, without_plots: None) -> None:
    write_sweep(tmp_path, LOADS, seeds=2)
    report = report_of(tmp_path)
    policies = {
        (one["policy"], one["load"]): one for one in csv.DictReader(report.files["1-policies.csv"].splitlines())
    }
    tail = list(csv.DictReader(report.files["1-ttft-tail.csv"].splitlines()))
    curves = {(one["policy"], one["load"]): one["ttft_ms"] for one in tail if one["fraction_slower"] == "0.05"}
    cells = Page(report.html).cells
    assert len(curves) == 6
    for key, value in curves.items():
        assert float(value) == pytest.approx(float(policies[key]["p95_TTFT_ms"]), rel=1e-5)
        assert f"{float(value):,.0f}" in cells


def test_every_table_and_plot_is_called_simulated_or_live(tmp_path: Path, without_plots: None) -> None:
    for source in ("simulated", "live"):
        write_sweep(tmp_path / source, LOADS, source=source)
        text = page_of(tmp_path / source)
        captions = re.findall(r"<h3>(.*?)</h3>|<caption>(load .*?)</caption>", text)
        assert [any(one.endswith(f", {source}") for one in pair) for pair in captions] == [True] * 8


def test_the_best_is_bold_and_a_reference_is_marked(tmp_path: Path, without_plots: None) -> None:
    write_results(
        tmp_path, [row(policy, [value]) for policy, value in (("gorgo", 10.0), ("random", 20.0), ("floor", 5.0))]
    )
    text = page_of(tmp_path)
    assert "<td><b>10</b></td>" in text
    assert '<tr class="reference"><th scope="row">floor</th>' in text
    assert text.count('class="reference"') == 2  # in the table of its load and in that of shares: no baseline
    assert "<b>5</b>" not in text


def test_names_from_files_are_escaped_everywhere(tmp_path: Path) -> None:
    names = ('<script>alert("x")</script> $\\frac{$ id="y" _', "_hidden & $1", '<g id="z">')
    for place, policy in enumerate(names):
        write_run(tmp_path / str(place), [10.0, 20.0, 30.0], policy, trace="<b>&amp;")
    text = page_of(tmp_path)
    found = Page(text)
    assert set(names) <= set(found.cells)
    assert "<script" not in text
    assert "_hidden &amp; $1</text>" in text


@pytest.mark.parametrize("name", ["a\0b\x1b[2J\u202eb\u2066\nb\u0085", "a\ud800b\U0001f600e\u0301\u6f22\U000f0000"])
def test_names_in_any_script_are_shown_without_controls_and_marks_of_direction(tmp_path: Path, name: str) -> None:
    for place in ("a", "b"):
        write_run(tmp_path / place, [10.0, 20.0, 30.0], name + place, trace=name)
    folder = tmp_path / name.replace("\0", "").replace("\ud800", "\udce9")
    folder.mkdir()
    (folder / "history.json").write_text(json.dumps([generation(n, sigma=0.5) for n in range(3)]))
    report = report_of(tmp_path)
    for text in (report.html, *report.files.values()):
        text.encode()
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
    for file, text in report.files.items():
        if file.endswith(".svg"):
            ElementTree.fromstring(text)


def test_a_text_that_no_page_shows_is_refused_with_its_place(tmp_path: Path) -> None:
    write_results(tmp_path, [row(), row("x" * 1001)])
    with pytest.raises(ReportError, match=r"results\.json, row 2: .x+.* has 1001 characters; expected at most 1000"):
        page_of(tmp_path)


def test_a_plot_without_data_is_left_out_with_the_reason(tmp_path: Path) -> None:
    write_results(tmp_path, [row(share={}, cache_hit=None)])
    (tmp_path / "history.json").write_text("[]")
    text = page_of(tmp_path)
    assert Page(text).labelled == []
    assert re.findall("Left out: (.*)</p>", text) == [
        "there is only one load.",
        "no run to compare with one of the paper&#39;s baselines.",
        *["no requests.jsonl with a TTFT was saved."] * 4,
        "there is no generation.",
    ]


def test_bounds_are_stated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_plots: None) -> None:
    for module, name, bound in (
        (plots_module, "MAX_PANELS", 2),
        (plots_module, "MAX_CURVES", 3),
        (page, "MAX_TABLES", 1),
        (page, "MAX_LEFT_OUT", 1),
    ):
        monkeypatch.setattr(module, name, bound)
    write_sweep(tmp_path, {f"p{n}": {1.0: 10.0, 2.0: 10.0, 3.0: 10.0} for n in range(4)})
    write_sweep(tmp_path / "exact", {f"p{n}": {1.0: 10.0, 2.0: 10.0} for n in range(3)}, trace="exact")
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "requests.jsonl").touch()
    (tmp_path / "history.json").write_text(json.dumps([generation(n) for n in range(250)]))
    text = page_of(tmp_path)
    assert '<p class="note">3 of 4 policies are drawn.</p>' in text
    assert '<p class="note">2 of 3 loads are drawn. 3 of 4 policies are drawn.</p>' in text
    assert text.count(" are drawn.") == 6  # none at the bound
    assert '<p class="note">1 of 3 loads have a table.</p>' in text
    assert text.count("<caption>load ") == 2  # one in each section
    assert "Rows left out: 50" in text
    assert re.findall("<li>(.*)</li>", text)[1:] == ["2 more"]


@pytest.mark.parametrize("values", [[10.0], []], ids=["one request", "no success"])
def test_a_run_with_little_in_it_has_a_page(tmp_path: Path, values: list[float]) -> None:
    write_run(tmp_path / "1", values)
    write_run(tmp_path / "2", values, time_scale=2.0)
    assert plots(page_of(tmp_path)) == (["1-p95-against-load", "1-slo-against-load", "1-ttft-tail"] if values else [])


def test_the_page_and_its_files_are_written_beside_the_results(tmp_path: Path, without_plots: None) -> None:
    write_run(tmp_path / "in", [10.0, 20.0])
    beside = tmp_path / "in" / "report"
    beside.mkdir()
    for name in ("3-ttft-tail.svg", "my-notes.csv"):
        (beside / name).write_text("an earlier one")
    assert write_report(tmp_path / "in", slos_ms=(500.0,)) == tmp_path / "in" / "report.html"
    report = report_of(tmp_path / "in")
    assert (tmp_path / "in" / "report.html").read_text() == report.html
    assert {path.name: path.read_text() for path in beside.iterdir()} == {
        **report.files,
        "my-notes.csv": "an earlier one",
    }


def test_plots_are_written_for_print_too_and_those_of_an_earlier_report_go(tmp_path: Path) -> None:
    write_run(tmp_path, [10.0, 20.0, 30.0], "gorgo")
    write_run(tmp_path / "b", [10.0, 20.0, 40.0], "random")
    write_report(tmp_path, forms=("png", "pdf"), show_progress=False)
    beside = tmp_path / "report"
    made = {path.name: path.read_bytes() for path in beside.iterdir()}
    drawn = {name.removesuffix(".svg") for name in made if name.endswith(".svg")}
    assert drawn
    assert {name for name in made if name.endswith(".png")} == {f"{name}.png" for name in drawn}
    assert {name for name in made if name.endswith(".pdf")} == {f"{name}.pdf" for name in drawn}
    assert all(content.startswith(b"\x89PNG") for name, content in made.items() if name.endswith(".png"))
    assert all(content.startswith(b"%PDF") for name, content in made.items() if name.endswith(".pdf"))
    assert f"report/{sorted(drawn)[0]}.pdf" in (tmp_path / "report.html").read_text()
    write_report(tmp_path, forms=("pdf",), show_progress=False)
    again = {path.name: path.read_bytes() for path in beside.iterdir()}
    assert again == {name: content for name, content in made.items() if not name.endswith(".png")}


def test_a_report_of_some_policies_has_no_other(tmp_path: Path, without_plots: None) -> None:
    for name in ("gorgo", "random", "least-load"):
        write_run(tmp_path / name, [10.0, 20.0], name)
    found = page.report(find_results(tmp_path, policies=["gorgo", "random"]), (500.0,))
    assert "random" in found.html
    assert "least-load" not in found.html
    with pytest.raises(ReportError, match=r"no run of 'lmetric'; there are: gorgo, least-load, random"):
        find_results(tmp_path, policies=["lmetric"])


def texts(table: PageTable | None) -> list[list[str]]:
    assert table is not None
    return [[one.label, *one.cells] for one in table.rows]


def bold(table: PageTable) -> list[tuple[str, str]]:
    return [(one.label, table.header[1 + place]) for one in table.rows for place in sorted(one.bold)]


def column(table: PageTable, name: str) -> list[str]:
    return [one.cells[table.header.index(name) - 1] for one in table.rows]


def test_a_table_has_means_over_runs_and_ratios_of_the_same_seeds() -> None:
    cells = [
        p95_cell("gorgo", 100.0, 350.0),
        p95_cell("prefix-cache", 200.0, 200.0),
        p95_cell("least-load", 300.0, 500.0),
        p95_cell("nearest", 300.0, 300.0),
        p95_cell("random", None),
        p95_cell("oracle", 50.0, 50.0),
    ]
    table = load_table(comparison({2.0: cells}), 2.0)
    assert table.caption == "load 0.5, simulated"
    assert column(table, "runs") == ["2", "2", "2", "2", "1", "2"]
    assert column(table, "requests") == ["2", "2", "2", "2", "1", "2"]
    assert column(table, "p95 TTFT, ms") == ["225", "200", "400", "300", "-", "50"]
    assert bold(table)[:2] == [("prefix-cache", "p50 TTFT, ms"), ("prefix-cache", "p95 TTFT, ms")]
    assert {label for label, _ in bold(table)} == {"prefix-cache"}  # never a reference
    assert [one.is_reference for one in table.rows] == [False] * 5 + [True]
    # Seed by seed against the best baseline: sqrt(0.5 * 1.75) is 0.935, sqrt(1.5 * 2.5) is 1.936.
    # With one degree of freedom t is 12.706: the intervals are wide.
    ratios = ratio_table(comparison({2.0: cells}))
    assert [row[:5] for row in texts(ratios)] == [
        ["gorgo", "0.5", "0.935", "prefix-cache", "0.000 to 2675.890, undecided"],
        ["least-load", "0.5", "1.936", "prefix-cache", "0.075 to 49.707, undecided"],
        ["nearest", "0.5", "1.500", "prefix-cache", "1.500 to 1.500, higher"],
        ["oracle", "0.5", "0.250", "prefix-cache", "0.250 to 0.250, lower"],
    ]
    assert ratios is not None
    assert "not the quotient of the two means" in ratios.note


def test_one_run_has_a_ratio_without_an_interval() -> None:
    table = ratio_table(comparison({1.0: [p95_cell("gorgo", 90.0), p95_cell("least-load", 120.0)]}))
    assert texts(table) == [["gorgo", "1", "0.750", "least-load", "-", "0.750", "least-load", "-"]]
    assert ratio_table(comparison({1.0: [p95_cell("gorgo", 90.0)]})) is None


def test_requests_and_errors_are_sums_and_agree_with_the_table_of_errors() -> None:
    first = Run(row(errors=2, n=5), Requests(5, np.empty(0), {"timeout": 2}))
    second = Run(row(errors=1, n=5, seed=1), Requests(5, np.empty(0), {"timeout": 1}))
    found = comparison({1.0: [Cell("gorgo", "gorgo", (first, second))]})
    table = load_table(found, 1.0)
    assert (column(table, "requests"), column(table, "errors")) == (["10"], ["3"])
    assert texts(error_table(found)) == [["gorgo", "1", "timeout", "3"]]


def test_a_measure_that_no_policy_has_is_no_column() -> None:
    table = load_table(comparison({1.0: [p95_cell("gorgo", 90.0)]}), 1.0)
    assert "p95 TTFT, ms" in table.header
    assert "p95 ITL, ms" not in table.header


def test_the_figures_of_the_tables_are_one_file() -> None:
    found = comparison({2.0: [p95_cell("gorgo", 100.0, 350.0)], 1.0: [p95_cell("a,b", 1234.5678, errors=3)]})
    rows = list(csv.DictReader(io.StringIO(policies_csv(found))))
    assert [(row["policy"], row["load"], row["runs"], row["errors"]) for row in rows] == [
        ("gorgo", "0.5", "2", "0"),
        ("a,b", "1", "1", "3"),
    ]
    assert [row["p95_TTFT_ms"] for row in rows] == ["225", "1234.57"]
    assert rows[0]["p95_ITL_ms"] == ""


def test_a_table_shows_each_measure_in_its_unit() -> None:
    figures: dict[str, Any] = {
        "errors": 3,
        "n": 1234,
        "ttft_ms": Spread(1.0, 1234.4, 5678.6, 9012.0),
        "e2e_s": Spread(1.0, 1.234, 5.678, 9.0),
        "itl_ms": Spread(1.0, 2.0, 33.4, 4.0),
        "cache_hit": 0.1234,
        "cache_hit_estimated": 0.5678,
        "prediction_error_ms": Spread(1.0, 55.5, 2.0),
        "slip_ms_p95": 0.25,
    }
    cell = Cell("gorgo", "gorgo", (Run(row(**figures)),))
    table = load_table(comparison({1.25: [cell]}, source="live"), 1.25)
    assert table.caption == "load 0.8, live"
    assert dict(zip(table.header, texts(table)[0], strict=True)) == {
        "policy": "gorgo",
        "runs": "1",
        "requests": "1,234",
        "errors": "3",
        "p50 TTFT, ms": "1,234",
        "p95 TTFT, ms": "5,679",
        "p99 TTFT, ms": "9,012",
        "p50 E2E, s": "1.23",
        "p95 E2E, s": "5.68",
        "p95 ITL, ms": "33",
        "cache hit, %": "12.3",
        "estimated, %": "56.8",
        "p50 prediction error, ms": "56",
        "p95 slip, ms": "0.2",
    }
    assert bold(table) == []  # one policy alone is not the best of any


def test_the_highest_cache_hit_is_the_best_and_estimates_and_slip_have_no_best() -> None:
    first = p95_cell("gorgo", 1.0, cache_hit=0.5, cache_hit_estimated=0.9, slip_ms_p95=1.0)
    second = p95_cell("random", 1.0, cache_hit=0.6, cache_hit_estimated=0.1, slip_ms_p95=2.0)
    oracle = p95_cell("oracle", 1.0, cache_hit=0.6)
    assert bold(load_table(comparison({1.0: [first, second, oracle]}), 1.0)) == [("random", "cache hit, %")]


@pytest.mark.parametrize(("count", "left_out"), [(200, 0), (203, 3)])
def test_rows_of_a_table_are_bounded(count: int, left_out: int) -> None:
    table = load_table(comparison({1.0: [p95_cell(f"p{number}", 1.0) for number in range(count)]}), 1.0)
    assert (len(table.rows), table.left_out) == (200, left_out)
    log = acceptance_log([ReportGeneration(number, {}, None, None, None, False, None) for number in range(count)])
    assert (log.rows[0].label, log.rows[-1].label, log.left_out) == (str(left_out), str(count - 1), left_out)


def test_shares_are_means_over_the_runs_that_have_them() -> None:
    rows = [row("random", share=share) for share in ({"us": 0.5, "eu": 0.5}, {"us": 1.0}, {})]
    mixed = Cell("random", "random", tuple(Run(one) for one in rows))
    table = share_table(comparison({2.0: [mixed, p95_cell("floor", 1.0, share={})], 1.0: [mixed]}))
    assert texts(table) == [["random", "0.5", "25.0%", "75.0%"], ["random", "1", "25.0%", "75.0%"]]
    assert table is not None
    assert table.header == ("policy", "load", "eu", "us")
    assert share_table(comparison({1.0: [p95_cell("floor", 1.0, share={})]})) is None


def test_the_smallest_replicas_are_added_up() -> None:
    share = {f"r{number:02}": 0.02 if number < 2 else 0.08 for number in range(14)}
    table = share_table(comparison({1.0: [p95_cell("gorgo", 1.0, share=share)]}))
    assert table is not None
    assert table.header[2:] == (*(f"r{number:02}" for number in range(2, 14)), "others")
    assert texts(table)[0][2:] == ["8.0%"] * 12 + ["4.0%"]


def test_errors_are_counted_by_policy_load_and_kind_the_most_frequent_first() -> None:
    first = saved_cell("gorgo", [], [], errors={"timeout": 2, "refused": 1})
    second = saved_cell("gorgo", [], errors={"timeout": 1200})
    table = error_table(comparison({2.0: [first, p95_cell("random", 1.0)], 1.0: [second]}))
    assert texts(table) == [
        ["gorgo", "1", "timeout", "1,200"],
        ["gorgo", "0.5", "timeout", "4"],
        ["gorgo", "0.5", "refused", "2"],
    ]
    assert error_table(comparison({1.0: [saved_cell("gorgo", [1.0])]})) is None


def test_an_acceptance_log_has_each_generation_with_its_reason() -> None:
    one = ReportGeneration(7, {"a": 0.5, "b": 2.0}, 0.12345, 1234.5, None, True, "better")
    table = acceptance_log([one, ReportGeneration(8, {"a": 0.5}, None, None, 999.6, False, None)])
    assert texts(table) == [
        ["7", "a 0.5, b 2", "0.123", "1,234", "-", "accepted", "better"],
        ["8", "a 0.5", "-", "-", "1,000", "rejected", "-"],
    ]
    assert bold(table) == [("7", "decision")]


# --- `gorgo report --minute`: which part grew, where and behind whose load, by a made log; and the page of a real one.


START_S = 1_775_405_700.0  # 2026-04-05T16:15 UTC
HASH = "00000000000000aa"


def logged(
    at_s: float, *, client: str = "chat", replica: str = "near-0", queue_s: float = 0.0, **more: Any
) -> LoggedRequest:
    """A request whose network, prefill and decoding are always alike."""
    ttft_s = 0.3 + queue_s
    row = LoggedRequest(
        received_s=START_S + at_s,
        model="m",
        input_tokens=2000,
        output_tokens=100,
        text_bytes=8000,
        status=200,
        hashes=(170,),
        block_bytes=2048,
        replica=replica,
        cached_tokens=500,
        attempts=1,
        ttft_s=ttft_s,
        e2e_s=ttft_s + 1.0,
        client=client,
        ttft_parts_s=(0.01, 0.0, 0.09, queue_s, 0.2, 0.0),
    )
    return replace(row, **more)


USUAL = [logged(-3000.0 + 30 * number, replica=f"near-{number % 2}") for number in range(100)]


def minute(rows: Sequence[LoggedRequest]) -> Any:
    return slow_minute(sorted([*USUAL, *rows], key=lambda row: row.received_s), START_S)


def flood() -> list[LoggedRequest]:
    """A client's long prompts at one replica, and those of another client that wait behind them."""
    batch = [logged(5.0 + 0.1 * n, client="batch", queue_s=n, cached_tokens=0, input_tokens=20_000) for n in range(10)]
    return batch + [logged(7.0 + n, queue_s=9.0 - n) for n in range(6)] + [logged(8.0, replica="near-1")]


def test_a_flood_is_named_by_its_part_its_replica_and_its_client() -> None:
    found = minute(flood())
    assert found.verdict.startswith("Queue took ")
    assert ", at near-0, for 9" in found.verdict
    assert found.verdict.endswith(" % behind requests of batch.")
    blame = {row.name: row.blame for row in found.clients}
    assert blame["batch"] > 0.8
    assert blame["batch"] + blame["chat"] == pytest.approx(1.0)
    near = {row.name: row for row in found.replicas}
    assert (near["near-0"].requests, near["near-1"].requests) == (16, 1)
    assert near["near-0"].most_at_once > 5 > near["near-1"].most_at_once
    assert near["near-0"].usual_requests == pytest.approx(1.0, rel=0.1)


def test_waits_at_the_router_are_behind_requests_of_all_replicas() -> None:
    ahead = [logged(1.0 + n, client="batch", replica="near-1", ttft_s=30.0, e2e_s=31.0) for n in range(3)]
    waiting = [logged(10.0 + n, ttft_parts_s=(5.0, 0.0, 0.09, 0.0, 0.2, 0.0), ttft_s=5.3) for n in range(9)]
    found = minute([*ahead, *waiting])
    assert found.verdict.startswith("Router took ")
    assert max(found.clients, key=lambda row: row.blame or 0.0).name == "batch"


def test_a_slow_network_blames_no_client() -> None:
    slow = [logged(n, ttft_s=1.3, e2e_s=2.3, ttft_parts_s=(0.01, 0.0, 1.09, 0.0, 0.2, 0.0)) for n in range(20)]
    assert minute(slow).verdict == "Network took 1,000 ms longer per request than in the hour before, at near-0."


def test_a_usual_minute_says_so() -> None:
    assert minute([logged(float(n)) for n in range(10)]).verdict == "No part took longer than in the hour before."


def test_without_an_hour_before_nothing_is_compared() -> None:
    found = slow_minute([logged(1.0), logged(2.0)], START_S)
    assert found.verdict.startswith("There is no usual minute to compare it with")
    assert "<td>-</td>" in minute_page(found)


def test_requests_of_older_logs_have_no_parts_and_are_counted() -> None:
    old = [replace(logged(float(n)), ttft_parts_s=()) for n in range(3)]
    found = minute(old)
    assert sum(row.requests for row in found.replicas) == 3
    assert all(row.minute_s is None for row in found.parts[:-1])


def test_a_minute_without_requests_is_refused_with_the_times_of_the_log() -> None:
    with pytest.raises(ReportError, match=r"expected a minute between .* UTC, which the log has"):
        slow_minute(USUAL, START_S + 7200.0)


def test_names_of_clients_are_text_on_the_page() -> None:
    page = minute_page(minute([logged(1.0, client="<script>")]), [TwinRow("oracle", 1, 0.1, 0.2)])
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "oracle, simulated" in page


def written(path: Path, rows: Sequence[LoggedRequest]) -> Path:
    lines: list[dict[str, Any]] = [{"gorgo_request_log": 1, "boot_id": "b", "started_s": 0.0, "block_bytes": 2048}]
    names = ("received_s", "model", "client", "input_tokens", "output_tokens", "text_bytes", "status", "replica")
    more = ("cached_tokens", "attempts", "queued_s", "ttft_s", "e2e_s")
    for one in rows:
        line: dict[str, Any] = {name: getattr(one, name) for name in (*names, *more)}
        lines.append(line | {"ttft_parts_s": list(one.ttft_parts_s), "boundaries": [], "block_hashes": [HASH]})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_command_writes_the_page_with_the_policy_and_the_oracle_beside_it(tmp_path: Path) -> None:
    log = written(tmp_path / "requests.jsonl", sorted([*USUAL, *flood()], key=lambda row: row.received_s))
    assert len(read_logged_requests(log)) == 117
    words = ["report", str(log), "--minute", "2026-04-05T16:15", "--config", str(ROOT / "regions.yaml")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    said, path = done.output.strip().splitlines()
    assert said.startswith("Queue took ")
    page = Path(path).read_text()
    for words_of_page in (
        "gorgo-ms, simulated",
        "oracle, simulated",
        "as it was",
        "Whose load",
        "The slowest requests",
    ):
        assert words_of_page in page
    assert "<script" not in page


def test_a_time_that_is_none_is_a_usage_error(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(tmp_path), "--minute", "noon"])
    assert done.exit_code == 2
    assert "expected a date and time" in done.output
