"""Published figures: every one has its place in a source, and verdicts on what the simulation gives."""

from __future__ import annotations

import re
from math import inf, isfinite
from typing import Any

import pytest

from experiments.command import PUBLISHED
from experiments.grid import Grid
from experiments.published import DOCUMENTS, WORDS, Claim, Published, Source, compared, page_of, verdict_on
from experiments.simulated import TaskRun
from experiments.systems.policies import HEADER, mean_cells
from experiments.tables import UNSURE, ClaimVerdict, TableSection, as_markdown, sections, with_interval
from experiments.windows import PolicyTask, Workload
from gorgo.lab.results import Spread
from gorgo.lab.simulate.compare import Ratio
from tests.experiments.rows import row

GRID = Grid(seeds=range(1))
#: A place is numbered, or described where the document numbers nothing.
PLACE = re.compile(
    r"(table|figure|appendix) \d+|(table|figures|text) (of|on) [\w, -]+|ablation of [\w -]+|results, [\w, ]+"
    r"|evaluation|overhead|summary|note|text"
)
SOURCE = Source("lodestar", "summary", "overall", "mean TTFT")


@pytest.fixture(scope="module")
def claims() -> dict[str, list[Claim]]:
    return {name: system.claims(GRID) for name, system in PUBLISHED.items()}


def test_all_five_systems_have_rows(claims: dict[str, list[Claim]]) -> None:
    assert list(claims) == ["gorgo", "lodestar", "llm-d", "push-map", "ranvier"]
    assert min(map(len, claims.values())) >= 5


def test_every_published_figure_has_a_document_a_place_a_row_and_a_column(claims: dict[str, list[Claim]]) -> None:
    for one in (claim for some in claims.values() for claim in some):
        source = one.published.source
        assert source.document in DOCUMENTS, one
        assert PLACE.fullmatch(source.place), one
        assert source.row, one
        assert source.column, one


def test_every_figure_is_a_number_or_a_range_as_printed(claims: dict[str, list[Claim]]) -> None:
    for one in (claim for some in claims.values() for claim in some):
        published = one.published
        assert 0.0 < published.low <= published.high, one
        if isfinite(published.high) and published.text not in ("comparable", "better"):
            assert Published.of(published.text, published.source) == Published.of(published.text, published.source)
            assert float(published.text.split("-")[0]) == published.low, one


def test_a_row_of_the_gorgo_paper_is_the_ratio_of_the_two_printed_figures(claims: dict[str, list[Claim]]) -> None:
    for one in claims["gorgo"]:
        ours, theirs = re.findall(r"[\d.]+", one.published.baseline)
        assert float(ours) / float(theirs) == pytest.approx(one.published.low, abs=6e-4), one


def test_a_row_that_is_not_tried_says_why_and_the_others_have_runs(claims: dict[str, list[Claim]]) -> None:
    for one in (claim for some in claims.values() for claim in some):
        assert bool(one.tasks) == (one.reproduced is not None), one
        assert one.tasks or one.note, one


def test_a_row_is_there_once(claims: dict[str, list[Claim]]) -> None:
    places = [
        (one.on, one.figure, one.published.text, str(one.published.source)) for some in claims.values() for one in some
    ]
    assert len(places) == len(set(places))


@pytest.mark.parametrize(
    ("text", "value", "ends", "word"),
    [
        ("1.02-2.15", 1.5, None, "reproduced"),
        ("1.41", 1.30, None, "reproduced"),
        ("1.41", 1.2, None, "smaller"),
        ("1.41", 1.8, None, "larger"),
        ("1.41", 0.9, None, "reversed"),
        ("1.41", 0.9, (0.7, 1.2), "smaller"),
        ("1.41", 0.9, (0.85, 0.95), "reversed"),
        ("1.41", 0.99, None, "smaller"),
        ("0.69", 0.5, None, "larger"),
        ("0.69", 0.9, None, "smaller"),
        ("0.69", 1.2, None, "reversed"),
    ],
)
def test_a_ratio_is_reproduced_larger_smaller_or_reversed(
    text: str, value: float, ends: tuple[float, float] | None, word: str
) -> None:
    low, high = ends or (None, None)
    assert verdict_on(Published.of(text, SOURCE), Ratio(value, low, high, 3)) == word


def test_a_value_that_is_no_ratio_has_no_direction() -> None:
    published = Published.of("58-98", SOURCE)
    words = [verdict_on(published, Ratio(value, None, None, 1), is_ratio=False) for value in (20.0, 90.0, 120.0)]
    assert words == ["smaller", "reproduced", "larger"]
    assert verdict_on(published, None) == "not tried"


def test_better_is_any_gain_and_comparable_is_none() -> None:
    better = Published(text="better", low=1.0, high=inf, source=SOURCE)
    assert verdict_on(better, Ratio(1.5, None, None, 1)) == "reproduced"
    assert verdict_on(better, Ratio(0.8, None, None, 1)) == "reversed"
    comparable = Published(text="comparable", low=1.0, high=1.0, source=SOURCE)
    assert [verdict_on(comparable, Ratio(value, None, None, 1)) for value in (1.05, 1.3, 0.8)] == [
        "reproduced",
        "larger",
        "smaller",
    ]


def test_the_page_has_every_row_with_its_source_and_verdict() -> None:
    one = Claim(
        system="A <system>",
        on="fleet & traffic",
        figure="mean TTFT, b / a",
        published=Published.of("1.41", SOURCE, "9 over 6 ms"),
        reproduced=lambda _: Ratio(1.4, 1.3, 1.5, 3),
        ours=lambda _: Ratio(1.6, None, None, 1),
        ours_name="gorgo-ms",
        target=">= 1.41",
    )
    other = Claim(
        system="B", on="o", figure="f", published=Published.of("5", SOURCE), is_ratio=False, note="no service"
    )
    rows = compared([one, other], {})
    page = page_of(rows, "One seed.")
    assert "A &lt;system&gt;" in page
    assert "fleet &amp; traffic" in page
    assert "Lodestar paper, summary: overall; mean TTFT" in page
    assert "1.40 [1.30-1.50]" in page
    assert "no service" in page
    assert "2 rows: 1 reproduced, 0 larger, 0 smaller, 0 reversed, 1 not tried." in page
    assert list(WORDS) == ["reproduced", "larger", "smaller", "reversed", "not tried"]
    assert rows[0].as_json()["source"] == "Lodestar paper, summary: overall; mean TTFT"
    assert rows[0].cells() == ("fleet & traffic", "mean TTFT, b / a", "1.41", "1.40 [1.30-1.50]", "1.60 (gorgo-ms)",
                               "reproduced")  # fmt: skip


# Verdicts and the Markdown of their tables.


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
