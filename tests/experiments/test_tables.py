"""Verdicts and the Markdown of their tables."""

from __future__ import annotations

from typing import Any

from experiments.simulated import TaskRun
from experiments.systems.policies import HEADER, mean_cells
from experiments.tables import UNSURE, ClaimVerdict, TableSection, as_markdown, sections, with_interval
from experiments.windows import PolicyTask, Workload
from gorgo.lab.results import Spread
from tests.experiments.rows import row


def verdict(value: float | None, **bounds: Any) -> ClaimVerdict:
    return ClaimVerdict(group="g", labels=("t",), value=value, **bounds)


def test_a_verdict_is_met_only_within_its_bounds() -> None:
    assert verdict(1.0).met is None
    assert verdict(1.0, at_most=1.0).met is True
    assert verdict(1.1, at_most=1.0).met is False
    assert verdict(0.9, at_least=1.0).met is False
    assert verdict(None, at_most=1.0).met is False


def test_a_verdict_is_sure_where_the_whole_interval_is_on_its_side() -> None:
    assert verdict(1.0, low=0.9, high=1.1, at_most=2.0).cells() == ("t", "<= 2.00", "1.000 [0.900, 1.100]", "pass")
    assert verdict(1.0, low=0.9, high=1.1, at_least=1.05).cells() == (
        "t",
        ">= 1.05",
        "1.000 [0.900, 1.100]",
        "missed ~",
    )
    assert verdict(1.0, at_most=2.0, note="why").cells() == ("t", "<= 2.00", "1.000", "pass ~", "why")
    assert verdict(None).cells() == ("t", "", "-", "")


def test_markdown_has_a_table_per_group_and_explains_the_mark_below_those_that_have_it() -> None:
    sure = ClaimVerdict(group="a", labels=("w",), value=1.0, low=0.9, high=1.1, at_most=2.0)
    unsure = ClaimVerdict(group="b", labels=("w",), value=1.0, low=0.9, high=1.1, at_most=1.05)
    text = as_markdown(sections([sure, unsure], HEADER, {"a": "First"}), "the end")
    assert text.splitlines()[:3] == [
        "**First**",
        "",
        "| on | of | against | figure | target | of / against [95 %] | met |",
    ]
    assert "**b**" in text
    assert text.count(UNSURE) == 1
    assert text.endswith(f"| w | <= 1.05 | 1.000 [0.900, 1.100] | pass ~ |\n\n{UNSURE}\n\nthe end\n")
    assert as_markdown([TableSection("", ("a",), [("1",)])], "end") == "| a |\n| --- |\n| 1 |\n\nend\n"


def test_a_row_as_json_has_its_words_and_whether_it_is_met() -> None:
    found = ClaimVerdict(group="g", labels=("a", "b"), value=2.0, at_most=1.0).as_json()
    assert (found["group"], found["text"], found["met"]) == ("g", "a, b", False)


def test_an_interval_is_shown_of_several_seeds_alone() -> None:
    assert [with_interval(values, ".1f") for values in ([], [1.0], [1.0, 2.0, 3.0])] == ["-", "1.0", "2.0 [-0.5-4.5]"]


def test_figures_are_means_over_seeds_workload_by_workload() -> None:
    here, there = (Workload(name=name, traces=("t",), time_scale=2.0) for name in ("here", "there"))
    runs = {
        PolicyTask(there, "gorgo-ms", 0): TaskRun(row=row(ttft_ms=200.0, e2e_s=2.0), cpu_s=0.0),
        PolicyTask(there, "gorgo-ms", 1): TaskRun(row=row(seed=1, ttft_ms=600.0, e2e_s=4.0), cpu_s=0.0),
        PolicyTask(here, "random", 0): TaskRun(row=row(ttft_ms=20.8, e2e_s=None), cpu_s=0.0),
    }
    assert Spread() == row(ttft_ms=None).ttft_ms
    assert mean_cells(list(runs), runs) == [
        ("there, load 0.5", "gorgo-ms", "200", "400", "1.50", "3.00", "50.0"),
        ("here, load 0.5", "random", "10", "21", "-", "-", "50.0"),
    ]
