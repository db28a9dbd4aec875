"""What the table of verdicts says, from findings made by hand."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from gorgo.apps.claims import Findings, RatioTarget, Workload, judge
from gorgo.apps.claims.policy_claims import HEADER, mean_cells
from gorgo.apps.claims.table import TableSection, as_markdown, cells, show_sections
from gorgo.apps.claims.verdict import ClaimVerdict
from gorgo.apps.demo.options import BASELINES
from gorgo.apps.results import ResultRow, Spread
from tests.apps.claims.rows import row

HERE, THERE = (Workload(name=name, traces=("t",), time_scale=2.0) for name in ("here", "there"))


def target(**changes: Any) -> RatioTarget:
    given: dict[str, Any] = {"group": "published", "policy": "gorgo-ms", "workloads": (HERE,), "others": ("gorgo",)}
    return RatioTarget(**given | {"figure": "p95 TTFT", "at_most": 0.9} | changes)


def rows(policy: str, *ttft_ms: float) -> dict[int, ResultRow]:
    return {seed: row(policy, seed=seed, ttft_ms=value) for seed, value in enumerate(ttft_ms)}


@pytest.mark.parametrize(
    ("changes", "ours_ms", "said"),
    [
        ({}, [80.0], ("here, load 0.5", "gorgo-ms", "gorgo", "p95 TTFT", "<= 0.90", "0.800")),
        ({}, [80.0, 80.0], ("here, load 0.5", "gorgo-ms", "gorgo", "p95 TTFT", "<= 0.90", "0.800 [0.800, 0.800]")),
        ({"figure": "p50 TTFT"}, [90.0], ("here, load 0.5", "gorgo-ms", "gorgo", "p50 TTFT", "<= 0.90", "0.900")),
        ({"workloads": (THERE,)}, [80.0], ("there, load 0.5", "gorgo-ms", "gorgo", "p95 TTFT", "<= 0.90", "-")),
        (
            {"others": ("gorgo", "random")},
            [80.0],
            ("here, load 0.5", "gorgo-ms", "gorgo", "p95 TTFT", "<= 0.90", "0.800"),
        ),
        ({"others": BASELINES}, [80.0], ("here, load 0.5", "gorgo-ms", "prefix-cache", "p95 TTFT", "<= 0.90", "1.600")),
        (
            {"others": ("gorgo-ms",), "others_on": (HERE,), "at_most": 1.05},
            [80.0],
            ("here, load 0.5", "gorgo-ms", "itself", "p95 TTFT", "<= 1.05", "1.000"),
        ),
        (
            {"workloads": (HERE, HERE), "others": BASELINES},
            [80.0],
            ("geometric mean of 2", "gorgo-ms", "the best", "p95 TTFT", "<= 0.90", "1.600"),
        ),
    ],
)
def test_a_verdict_s_cells(changes: dict[str, Any], ours_ms: list[float], said: tuple[str, ...]) -> None:
    found = {
        (HERE, "gorgo-ms"): rows("gorgo-ms", *ours_ms),
        (HERE, "gorgo"): rows("gorgo", 100.0, 100.0),
        (HERE, "random"): rows("random", 400.0),
        (HERE, "prefix-cache"): rows("prefix-cache", 50.0),
        (HERE, "least-load"): rows("least-load", 70.0),
    }
    assert cells(judge(target(**changes), found))[:6] == said


def test_figures_are_means_over_seeds_setting_by_setting() -> None:
    def one(seed: int, ttft_ms: float, e2e_s: float, hit: float | None) -> ResultRow:
        return replace(
            row(seed=seed),
            ttft_ms=Spread(1.0, ttft_ms, 2 * ttft_ms, 1.0),
            e2e_s=Spread(1.0, e2e_s, 2 * e2e_s, 1.0),
            cache_hit=hit,
        )

    assert mean_cells(
        {
            (THERE, "gorgo-ms"): {0: one(0, 100.0, 1.0, 0.5), 1: one(1, 300.0, 2.0, 0.75)},
            (HERE, "random"): {0: one(0, 10.4, 0.125, None)},
            (THERE, "floor"): {0: replace(row(), ttft_ms=Spread(), e2e_s=Spread())},
            (HERE, "oracle"): {},
        }
    ) == [
        ("there, load 0.5", "floor", "-", "-", "-", "-", "50.0"),
        ("there, load 0.5", "gorgo-ms", "200", "400", "1.50", "3.00", "62.5"),
        ("here, load 0.5", "random", "10", "21", "0.12", "0.25", "-"),
    ]


def findings() -> Findings:
    found = {(HERE, "gorgo-ms"): rows("gorgo-ms", 80.0, 100.0), (HERE, "gorgo"): rows("gorgo", 100.0, 100.0)}
    asked = [target(), target(group="mine", at_most=0.5), target(workloads=(THERE,))]
    verdicts = [judge(one, found) for one in asked]
    return Findings(verdicts=verdicts, rows=found, runs=4, made=3, cpu_s=12.4, wall_s=6.6)


def test_a_summary_counts_what_was_met_and_what_it_took() -> None:
    assert findings().summary() == (
        "1 of 3 targets met, all simulated; 4 runs, 12 s of processor time; 3 of them were made now, in 7 s."
    )


def test_markdown_has_a_table_per_group_and_the_figures() -> None:
    """The mean of 0.8 and 1.0 is the root of 0.8; two seeds reach twelve standard errors either way."""
    mark = "`~`: the interval contains the target; more seeds could turn the verdict."
    assert as_markdown(findings().sections(), findings().summary()).splitlines()[:18] == [
        "**Against the published policy**",
        "",
        "| on | of | against | figure | target | of / against [95 %] | met |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| here, load 0.5 | gorgo-ms | gorgo | p95 TTFT | <= 0.90 | 0.894 [0.217, 3.692] | pass ~ |",
        "| there, load 0.5 | gorgo-ms | gorgo | p95 TTFT | <= 0.90 | - | missed ~ |",
        "",
        mark,
        "",
        "**mine**",
        "",
        "| on | of | against | figure | target | of / against [95 %] | met |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| here, load 0.5 | gorgo-ms | gorgo | p95 TTFT | <= 0.50 | 0.894 [0.217, 3.692] | missed ~ |",
        "",
        mark,
        "",
        "| on | policy | TTFT p50 ms | p95 | E2E p50 s | p95 | hit % |",
    ]


def test_the_mark_is_explained_below_the_tables_that_have_it_and_nowhere_else() -> None:
    sure = [
        TableSection(
            "a", HEADER, [cells(ClaimVerdict(group="a", labels=("w",), value=1.0, low=0.9, high=1.1, at_most=2.0))]
        )
    ]
    out = StringIO()
    show_sections(sure, Console(file=out, width=140), "end")
    assert "~" not in as_markdown(sure, "end") + out.getvalue()
    out = StringIO()
    show_sections(findings().sections(), Console(file=out, width=140), "end")
    assert out.getvalue().count("`~`: the interval contains the target") == 2


def test_a_terminal_shows_the_same_cells() -> None:
    out = StringIO()
    show_sections(findings().sections(), Console(file=out, width=140), findings().summary())
    lines = [line.split() for line in out.getvalue().splitlines()]
    for line in as_markdown(findings().sections(), findings().summary()).splitlines():
        if line.startswith("| here") or line.startswith("| there"):
            assert line.replace("|", " ").split() in lines
