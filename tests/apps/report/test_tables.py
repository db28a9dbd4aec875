"""The tables of the page: means, the best, ratios and counts worked out by hand."""

from __future__ import annotations

import csv
import io
from typing import Any

import numpy as np
import pytest

from gorgo.apps.report.runs import Cell, ReportGeneration, Requests, Run
from gorgo.apps.report.tables import (
    PageTable,
    acceptance_log,
    error_table,
    load_table,
    policies_csv,
    ratio_table,
    share_table,
)
from gorgo.apps.results import Spread
from tests.apps.report.builders import comparison, p95_cell, row, saved_cell


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
