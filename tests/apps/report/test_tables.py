"""The tables of the page: means, the best, ratios and counts worked out by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from gorgo.apps.report import sections, words
from gorgo.apps.report.runs import Cell, Comparison, ReportGeneration, Requests, Run
from gorgo.apps.report.sections import comparison_section
from gorgo.apps.report.statistics import HIT, HIT_ESTIMATED, TTFT_P95
from gorgo.apps.report.tables import PageTable, acceptance_log, error_table, load_table
from gorgo.apps.results import Spread
from tests.apps.report.made import records, row


def run(
    label: str,
    seed: int = 0,
    p95_ms: float | None = None,
    *,
    kinds: Mapping[str, int] | None = None,
    each_ms: Sequence[float] = (),
    **more: Any,
) -> Run:
    """One run; with `kinds` of errors, or the TTFT of each request, its requests were kept."""
    known: dict[str, Any] = {"ttft_ms": Spread(p50=p95_ms, p95=p95_ms, p99=p95_ms)} if p95_ms else {}
    kept = None
    if kinds is not None or each_ms:
        nothing = np.full(len(each_ms), np.nan)
        kept = Requests(
            scheduled_s=nothing,
            ttft_ms=np.array(each_ms),
            e2e_s=nothing,
            predicted_ttft_ms=nothing,
            rtt_ms=nothing,
            replica=np.full(len(each_ms), -1, dtype=np.int32),
            replicas=(),
            regions={},
            errors=kinds or {},
        )
    return Run(row(records([1.0]), label, seed=seed, **known | more), kept)


def cell(label: str, *runs: Run) -> Cell:
    return Cell(label, label, runs)


def comparison(loads: Mapping[float, Sequence[Cell]], *, source: str = "simulated") -> Comparison:
    return Comparison("t", source, {time_scale: tuple(cells) for time_scale, cells in loads.items()})


def texts(table: PageTable) -> list[list[str]]:
    return [[one.label, *(each.text for each in one.cells)] for one in table.rows]


def bold(table: PageTable) -> list[tuple[str, str]]:
    header = table.header
    return [(one.label, name) for one in table.rows for name, each in zip(header, one.cells, strict=True) if each.bold]


def column(table: PageTable, name: str) -> list[str]:
    place = table.header.index(name)
    return [one.cells[place].text for one in table.rows]


def test_a_table_has_means_over_runs_and_ratios_of_the_same_seeds() -> None:
    table = load_table(
        comparison(
            {
                2.0: [
                    cell("gorgo", run("gorgo", 0, 100.0), run("gorgo", 1, 400.0)),
                    cell("prefix-cache", run("prefix-cache", 0, 200.0), run("prefix-cache", 1, 200.0)),
                    cell("least-load", run("least-load", 0, 300.0), run("least-load", 1, 500.0)),
                    cell("oracle", run("oracle", 0, 50.0), run("oracle", 1, 50.0)),
                ]
            }
        ),
        2.0,
    )
    assert table.caption == "time_scale 2, load 0.5 of the trace's own, simulated"
    assert column(table, "runs") == ["2"] * 4
    assert column(table, "p95 TTFT, ms") == ["250", "200", "400", "50"]
    # Seed by seed against the best baseline: halves and doubles are no difference in the mean.
    assert [text.split(" ")[0] for text in column(table, "p95 TTFT / best baseline")] == [
        "1.000",
        "1.000",
        "1.936",
        "0.250",
    ]
    assert column(table, "p95 TTFT / best baseline")[3] == "0.250 (0.250 to 0.250)"
    # All have the same E2E: none is the better one, and the first baseline is what the others are compared with.
    assert bold(table) == [("prefix-cache", name) for name in ("p50 TTFT, ms", "p95 TTFT, ms", "p99 TTFT, ms")]
    assert [one.yardstick for one in table.rows] == [False, False, False, True]
    assert table.note == (
        "Means over runs; bold is the best of the policies in each column. "
        "The best of the paper's baselines here: prefix-cache in p95 TTFT and prefix-cache in p95 E2E; "
        "it was picked on these same runs. "
        "Ratios are geometric means over runs with the same seed, with 95 % intervals. "
        "Rows in italics are yardsticks that no router can be."
    )


def test_a_table_shows_each_measure_in_its_unit() -> None:
    figures: dict[str, Any] = {
        "errors": 3,
        "ttft_ms": Spread(1.0, 1234.4, 5678.6, 9012.0),
        "e2e_s": Spread(1.0, 1.234, 5.678, 9.0),
        "itl_ms": Spread(1.0, 2.0, 33.4, 4.0),
        "cache_hit": 0.1234,
        "cache_hit_estimated": 0.5678,
        "prediction_error_ms": Spread(1.0, 55.5, 2.0),
        "slip_ms_p95": 0.25,
    }
    table = load_table(comparison({1.25: [cell("gorgo", run("gorgo", **figures))]}, source="live"), 1.25)
    assert table.caption == "time_scale 1.25, load 0.8 of the trace's own, live"
    assert dict(zip(table.header, texts(table)[0][1:], strict=True)) == {
        "runs": "1",
        "errors": "3",
        "p50 TTFT, ms": "1,234",
        "p95 TTFT, ms": "5,679",
        "p99 TTFT, ms": "9,012",
        "p50 E2E, s": "1.23",
        "p95 E2E, s": "5.68",
        "p95 ITL, ms": "33",
        "cache hit, %": "12.3",
        "believed, %": "56.8",
        "p50 prediction error, ms": "56",
        "p95 slip, ms": "0.2",
    }
    # One policy alone is not the best of any.
    assert bold(table) == []
    assert table.note == (
        "Means over runs; bold is the best of the policies in each column. "
        "One run each: no intervals, and small differences may be noise."
    )


def test_the_highest_cache_hit_is_the_best_and_what_is_believed_or_late_competes_with_none() -> None:
    first = run("gorgo", cache_hit=0.5, cache_hit_estimated=0.9, slip_ms_p95=1.0)
    second = run("random", cache_hit=0.6, cache_hit_estimated=0.1, slip_ms_p95=2.0)
    assert bold(load_table(comparison({1.0: [cell("gorgo", first), cell("random", second)]}), 1.0)) == [
        ("random", "cache hit, %")
    ]


def test_what_is_unknown_is_a_dash() -> None:
    unknown = run("gorgo", ttft_ms=Spread(), cache_hit=None)
    table = load_table(comparison({1.0: [cell("gorgo", unknown), cell("least-load", run("least-load", 0, 9.0))]}), 1.0)
    assert column(table, "p95 TTFT, ms") == ["-", "9"]
    assert column(table, "p95 TTFT / best baseline") == ["-", "1.000"]


@pytest.mark.parametrize(("count", "note"), [(200, ""), (201, " 1 row left out."), (203, " 3 rows left out.")])
def test_rows_of_a_table_are_bounded(count: int, note: str) -> None:
    many = [cell(f"p{number}", run(f"p{number}")) for number in range(count)]
    table = load_table(comparison({1.0: many}), 1.0)
    assert len(table.rows) == 200
    assert table.note.endswith(f"noise.{note}")


def test_errors_are_counted_by_policy_load_and_kind_the_most_first() -> None:
    table = error_table(
        comparison(
            {
                2.0: [
                    cell("gorgo", run("gorgo", kinds={"timeout": 2, "refused": 1}), run("gorgo", kinds={"timeout": 5})),
                    cell("random", run("random")),
                ],
                1.0: [cell("gorgo", run("gorgo", kinds={"timeout": 1200}), run("gorgo"))],
            }
        )
    )
    assert table is not None
    assert texts(table) == [
        ["gorgo", "1", "timeout", "1,200"],
        ["gorgo", "2", "timeout", "7"],
        ["gorgo", "2", "refused", "1"],
    ]
    assert (table.header, table.note) == (("time_scale", "error", "requests"), "")
    assert error_table(comparison({1.0: [cell("gorgo", run("gorgo", kinds={}))]})) is None
    many = error_table(comparison({1.0: [cell("gorgo", run("gorgo", kinds={f"e{n}": 1 for n in range(202)}))]}))
    assert many is not None
    assert (len(many.rows), many.note) == (200, "2 rows left out.")


def test_an_acceptance_log_has_the_last_generations() -> None:
    one = ReportGeneration(7, {"a": 0.5, "b": 2.0}, 0.12345, 1234.5, None, True, "better")
    other = ReportGeneration(8, {"a": 0.5}, None, None, 999.6, False, "")
    table = acceptance_log([one, other])
    assert texts(table) == [
        ["7", "a 0.5, b 2", "0.123", "1,234", "-", "accepted", "better"],
        ["8", "a 0.5", "-", "-", "1,000", "rejected", "-"],
    ]
    assert bold(table) == [("7", "decision")]
    assert table.note == ""
    long = acceptance_log([one] * 198 + [other] * 3)
    assert (len(long.rows), long.rows[0].label, long.rows[-1].label) == (200, "7", "8")
    assert long.note == "1 earlier generation left out."


# -- sentences


@pytest.mark.parametrize(
    ("value", "base", "said"),
    [
        (100.0, 100.0, "the same"),
        (99.96, 100.0, "less than 0.1 % lower"),
        (99.9, 100.0, "0.1 % lower"),
        (90.1, 100.0, "9.9 % lower"),
        (110.0, 100.0, "10 % higher"),
        (112.6, 100.0, "13 % higher"),
        (1300.0, 100.0, "1,200 % higher"),
    ],
)
def test_a_distance_is_told_as_finely_as_it_matters(value: float, base: float, said: str) -> None:
    assert words.percent_apart(value, base) == said


def test_losses_beyond_six_loads_are_counted() -> None:
    won = {float(n): {"a": 1.0, "b": 2.0} for n in range(20, 11, -1)}
    lost = {float(n): {"a": 2.0, "b": 1.0} for n in range(8, 0, -1)}
    assert words.best_of(TTFT_P95, won | lost) == (
        "a has the lowest p95 TTFT at 9 of 17 loads (50.0 % below the next best); "
        + ", ".join(f"at time_scale {n} b is 50 % lower" for n in range(8, 2, -1))
        + " and another is better at 2 more."
    )


def test_failures_are_counted_and_the_policy_with_most_is_named() -> None:
    found = comparison(
        {
            2.0: [cell("a", run("a", n=10, errors=2)), cell("b", run("b", n=20, errors=3), run("b", n=5, errors=0))],
            1.0: [cell("a", run("a", n=1000, errors=2))],
        }
    )
    assert words.errors(found) == "7 of 1,035 requests failed; most of them under a (4)."
    assert words.errors(comparison({1.0: [cell("a", run("a", n=1, errors=0))]})) == "None of 1 request failed."


def test_belief_is_told_where_it_is_furthest_from_the_reports() -> None:
    found = comparison(
        {
            2.0: [
                cell("a", run("a", cache_hit=0.5, cache_hit_estimated=0.6)),
                cell("b", run("b", cache_hit=0.5, cache_hit_estimated=0.25)),
            ],
            1.0: [cell("c", run("c", cache_hit=None, cache_hit_estimated=0.9))],
        }
    )
    assert words.belief(found, HIT, HIT_ESTIMATED) == (
        "Belief and the engines' reports are furthest apart under b at time_scale 2: 25.0 % believed, 50.0 % real."
    )
    unknown = comparison({1.0: [cell("c", run("c", cache_hit_estimated=None))]})
    assert words.belief(unknown, HIT, HIT_ESTIMATED) == "What the routers believed is not known."


def test_shares_are_means_of_the_runs_that_know_them() -> None:
    leaning = cell("a", run("a", share={"us": 0.5, "eu": 0.5}), run("a", share={"us": 1.0}), run("a", share={}))
    assert words.mean_share(leaning) == {"eu": 0.25, "us": 0.75}
    assert words.mean_share(cell("a", run("a", share={}))) == {}


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        ([], "No request was answered, so there is no share."),
        ([{"us": 0.75, "eu": 0.25}], "p0 leans most on one replica: 75% of its requests go to us at time_scale 1."),
        (
            [{"eu": 0.5, "us": 0.5}] * 2,
            "p1 leans most on one replica: 50% of its requests go to eu at time_scale 1; no other is more even.",
        ),
    ],
)
def test_leaning_on_one_replica_is_told_of_those_that_were_answered(shares: list[dict[str, float]], said: str) -> None:
    cells = [cell(f"p{number}", run("p", share=share)) for number, share in enumerate(shares)]
    assert words.spread_of_load(comparison({1.0: cells or [cell("p", run("p", share={}))]})) == said


# -- sections


def test_a_section_says_what_was_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sections, "svg", lambda *_, **__: "")  # drawing takes a second

    def sized(label: str, n: int, seed: int) -> Cell:
        return cell(label, run(label, seed, n=n, share={}, cache_hit=None))

    section = comparison_section(
        comparison({2.0: [sized("gorgo", 1000, 0), sized("random", 1000, 1)], 1.0: [sized("floor", 1500, 1)]}), "c0"
    )
    assert section.title == "t, simulated"
    assert section.lede[0] == (
        "t at time_scale 2 and 1; 2 seeds; 1,000 to 1,500 requests a run. "
        "Compared: gorgo and random, with floor as yardsticks."
    )
    assert [table.caption.split(",")[0] for table in section.tables] == ["time_scale 2", "time_scale 1"]


def test_words_under_a_distribution_are_of_all_requests_of_all_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Medians of 1 to 5 and of 2 to 6 ms; the 99th percentiles are 4.96 and 5.96 ms."""
    monkeypatch.setattr(sections, "svg", lambda *_, **__: "")

    def kept(label: str, *values_ms: list[float]) -> Cell:
        return cell(label, *(run(label, each_ms=values, share={}, cache_hit=None) for values in values_ms))

    plots = comparison_section(
        comparison({1.0: [kept("gorgo", [1.0, 5.0], [2.0, 3.0, 4.0]), kept("random", [2.0, 3.0, 4.0, 5.0, 6.0])]}), "c0"
    ).plots
    assert plots[1].title == "TTFT distribution (simulated)"
    assert plots[1].sentences[:2] == (
        "gorgo has the lowest p50 TTFT at time_scale 1, 3 ms; random follows with 4 ms (33 % higher).",
        "gorgo has the lowest p99 TTFT at time_scale 1, 5 ms; random follows with 6 ms (20 % higher).",
    )
    assert plots[2].svg is None
    assert plots[2].sentences[0].startswith("Left out: it needs requests.jsonl")
