"""Every figure of the documents against the stored result of its command, both ways, and the README's tables to the
byte.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.documents import DOCS, ROOT
from tests.figures.__main__ import show
from tests.figures.comparison import BURST_HEADER, PICTURE, POLICIES, TIME_SCALES, burst, comparison, picture
from tests.figures.marked import Part, Table, View, agrees, numbers_of, parts_of, problems, tables_outside
from tests.figures.readme import SHOWN, Shown, table_of
from tests.figures.stored import FOLDER, read_stored, stored_names
from tests.figures.table import FIGURES, NOT_STORED, view_of
from tests.figures.written import markdown, write_table

# --- Every figure of the documents that a command makes against that command's stored result, both ways.


PAGES = [
    ROOT / "README.md",
    ROOT / "datasets/README.md",
    *sorted(DOCS.glob("*.md")),
    *sorted((DOCS / "policies").glob("*.md")),
]
#: First columns of tables that hold figures which nothing has measured: other tests hold those against the code.
NOT_MEASURED = {"replica", "label", "tuner label", "code", "policy in table 6"}
COMMIT = re.compile(r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7}\b")


def all_parts() -> Iterator[Part]:
    for page in PAGES:
        yield from parts_of(page.read_text())[0]


def test_marked_figures_are_those_of_their_stored_results() -> None:
    wrong = [
        f"{page.name}, line {part.line}: {problem}"
        for page in PAGES
        for part in parts_of(page.read_text())[0]
        if part.stored
        for problem in problems(part.text, view_of(part.names))
    ]
    assert wrong == []


def test_every_stored_result_is_shown_and_every_shown_one_is_stored() -> None:
    shown = {name for part in all_parts() if part.stored for name in part.names}
    assert shown == set(stored_names()) <= set(FIGURES)


def test_a_stored_result_names_commands_machine_commit_and_date() -> None:
    for name in stored_names():
        stored = read_stored(name)
        assert [run.command for run in stored.runs] == list(FIGURES[name].commands)
        assert re.fullmatch(r"[0-9a-f]{7}", stored.commit), name
        for run in stored.runs:
            assert re.fullmatch(r"\d{4}-\d\d-\d\d", run.date), name
            assert "cores" in run.machine, name
            assert "load average" in run.machine, name
            assert run.result, name


def test_what_was_measured_and_is_not_stored_is_listed_with_its_commits(capsys: pytest.CaptureFixture[str]) -> None:
    parts = [part for part in all_parts() if not part.stored]
    assert {name for part in parts for name in part.names} == set(NOT_STORED)
    assert [name for name, one in NOT_STORED.items() if not (one.why and COMMIT.search(one.commits))] == []
    show()
    printed = capsys.readouterr().out
    assert [name for name in (*FIGURES, *NOT_STORED) if not re.search(rf"^{name} ", printed, re.M)] == []


def test_no_measured_table_is_without_a_mark() -> None:
    for page in PAGES:
        _, outside = parts_of(page.read_text())
        assert [header for header in tables_outside(outside) if header[0] not in NOT_MEASURED] == [], page


def test_no_page_names_a_commit() -> None:
    """The stored result has it, and for the others the list of what is not stored."""
    pages = [*PAGES, *(ROOT / folder / "README.md" for folder in ("examples", "packaging", "terraform"))]
    named = [(page.name, found) for page in pages for found in COMMIT.findall(page.read_text())]
    assert named == []


def test_pages_link_to_the_folder_of_results() -> None:
    assert f"]({FOLDER.name}/" in (DOCS / "README.md").read_text()


# --- Marks and comparison, on pages made up here: each kind of wrong figure is found, and words around may be any.


VIEW = View(
    tables=[
        Table(
            labels=("load", "way"),
            rows={
                ("1.3", "at once"): {"good": 90.07, "p95": [12.04, 0.333], "verdict": "missed ~", "told": None},
                ("1.3", "held"): {"good": 92.96, "p95": [8.4, 1.0], "verdict": "pass", "told": None},
            },
        )
    ],
    lines=["policy   p95", "gorgo-ms 735 "],
    values={"good": 92.96, "capacity": 0.714},
    commits=frozenset({"0de2cbd"}),
    dates=frozenset({"2026-11-22"}),
)
TABLE = """
| load | way | verdict | good | p95 | told |
|---|---|---|---|---|---|
| 1.3 | at once | missed ~ | 90.1 % | 12.0 s (0.33) | - |
| | held | pass | **93.0 %** | 8.4 s (1.00) | - |
"""
FENCE = """
```text
policy   p95
gorgo-ms 735
```
"""
PROSE = "Of `1.3` times [capacity](x.md#7) 93 % are good (0.71 of p95), measured at 0de2cbd on 2026-11-22."


@pytest.mark.parametrize("text", [TABLE, FENCE, PROSE, f"{PROSE}\n{TABLE}\nAnd 0.714:\n{FENCE}"])
def test_what_was_stored_may_be_shown_in_any_form(text: str) -> None:
    assert problems(text, VIEW) == []


@pytest.mark.parametrize(
    ("text", "said", "wrong"),
    [
        (TABLE, "93.0 %", "93.1 %"),
        (TABLE, "93.0 %", "-"),
        (TABLE, "(0.33)", "(0.34)"),
        (TABLE, " (0.33)", ""),
        (TABLE, "| missed ~", "| pass"),
        (TABLE, "1.00) | - |", "1.00) | 3 |"),
        (TABLE, "| held", "| hedged"),
        (TABLE, "| 1.3 |", "| 1.4 |"),
        (TABLE, "| good |", "| better |"),
        (TABLE, "| way |", "| how |"),
        (TABLE, "| told |", "| p95 |"),
        (FENCE, "735", "736"),
        (PROSE, "93 %", "94 %"),
        (PROSE, "0.71 of", "0.71 to 0.77 of"),
        (PROSE, "0de2cbd", "42a9319"),
        (PROSE, "2026-11-22", "2026-11-21"),
        (PROSE, PROSE, "Nothing is shown."),
    ],
)
def test_a_wrong_figure_is_found(text: str, said: str, wrong: str) -> None:
    assert text.count(said) == 1
    assert problems(text.replace(said, wrong), VIEW) != []


@pytest.mark.parametrize(
    ("printed", "value", "same"),
    [
        ("93.0", 92.96, True),
        ("93.1", 92.96, False),
        ("93", 92.96, True),
        ("1,054", 1054.49, True),
        ("1,054", 1053.4, False),
        ("+1.1", 1.08, True),
        ("-1.1", 1.08, False),
        ("0.05", 0.0549, True),
        ("0.05", 0.0551, False),
    ],
)
def test_a_number_is_right_if_the_value_rounds_to_it(printed: str, value: float, same: bool) -> None:
    assert agrees(printed, value) is same


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("**+1.1 %**, 24,000 of 94,", ["+1.1", "24,000", "94,"]),
        ("0.821 [0.802, 0.841]; 30 / 64", ["0.821", "0.802", "0.841", "30", "64"]),
        ("276-303 ms, -4.5 %, 3.05x", ["276", "303", "-4.5", "3.05"]),
        ("p95 of HTTP/2 on L40S, us-ashburn-0, x1.25", []),
        ("at 6b4b55a on 2026-11-22, [4](a-7.md), `5`", ["4"]),
    ],
)
def test_numbers_are_told_from_names_codes_and_dates(text: str, numbers: list[str]) -> None:
    assert numbers_of(text.replace("[4]", "4")) == numbers


def test_several_results_may_be_shown_in_one_part() -> None:
    other = View(tables=[Table(labels=("blocks",), rows={("30",): {"MB": 20.4}})], values={"weight": 356.0})
    text = f"{PROSE} 356 MB.\n{TABLE}\n| blocks | MB |\n|---|---|\n| 30 | 20 |\n"
    assert problems(text, View.joined([VIEW, other])) == []
    assert len(problems(text, VIEW)) == 2


def test_parts_are_told_from_the_rest_of_a_page() -> None:
    page = "a\n<!-- figures: one, two -->\nb\n<!-- /figures -->\nc\n<!-- not stored: three -->\nd\n<!-- /figures -->\n"
    parts, outside = parts_of(page)
    assert [(part.stored, part.names, part.line, part.text) for part in parts] == [
        (True, ("one", "two"), 2, "b"),
        (False, ("three",), 6, "d"),
    ]
    assert outside == "a\nc"


@pytest.mark.parametrize(
    "page",
    [
        "<!-- figures: one -->\na\n",
        "a\n<!-- /figures -->\n",
        "<!-- figures: one -->\n<!-- not stored: two -->\n<!-- /figures -->\n",
    ],
)
def test_a_mark_without_its_other_half_is_an_error(page: str) -> None:
    with pytest.raises(ValueError, match="line"):
        parts_of(page)


@pytest.mark.parametrize(
    ("rows", "measured"),
    [
        ("| a | 12 ms |\n| b | **+3 %** |", True),
        ("| a | 1 |\n| b | text |\n| c | text |", False),
        ("| 1 | a |\n| 2 | b |", False),
        ("| a | `12` |\n| b | `3` |", False),
    ],
)
def test_a_table_of_figures_is_known_by_its_cells(rows: str, measured: bool) -> None:
    page = f"words\n\n| name | p95 |\n|---|---|\n{rows}\n\n```text\n| a | 1 |\n```\n"
    assert tables_outside(page) == ([["name", "p95"]] if measured else [])


# --- The README's tables and picture against the stored results, to the byte; and the comparison, on rows made up
# here.


@pytest.mark.parametrize("shown", SHOWN, ids=lambda shown: f"{shown.page.stem}-{shown.figures}")
def test_a_table_of_the_readme_and_of_the_results_is_the_one_that_its_stored_result_makes(shown: Shown) -> None:
    made = f"<!-- figures: {shown.figures} -->\n{markdown(table_of(shown))}<!-- /figures -->\n"
    assert made in shown.page.read_text(), "run `python -m tests.figures.readme`"


def test_the_picture_of_the_readme_is_the_one_that_the_stored_result_makes() -> None:
    pytest.importorskip("matplotlib")
    assert PICTURE.read_text() == picture(), "run `python -m tests.figures.readme`"


def test_an_empty_part_is_written_once_and_the_page_behind_it_stays(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- figures: one -->\n<!-- /figures -->\n\nText.\n\n<!-- figures: two -->\n<!-- /figures -->\n")
    table = Table(labels=("load",), rows={("half",): {"sooner": "12 %"}})
    write_table(page, "one", table)
    shown = "<!-- figures: one -->\n| load | sooner |\n|---|---|\n| half | 12 % |\n<!-- /figures -->\n"
    assert page.read_text() == f"{shown}\nText.\n\n<!-- figures: two -->\n<!-- /figures -->\n"
    write_table(page, "one", table)
    assert page.read_text().startswith(f"{shown}\nText.")
    with pytest.raises(LookupError, match=r"page\.md has no part for the figure three"):
        write_table(page, "three", table)


def row(policy: str, scale: float, seed: int, first_s: float, whole_s: float, gap_ms: float) -> dict[str, Any]:
    return {
        "policy": policy,
        "time_scale": scale,
        "seed": seed,
        "ttft_ms": {"p95": 1000 * first_s},
        "e2e_s": {"p95": whole_s},
        "itl_ms": {"p95": gap_ms},
    }


def test_the_comparison_says_sooner_and_later_and_shows_an_interval_that_holds_no_change() -> None:
    windows = [
        row(policy, scale, seed, 0.9 if policy == "gorgo-ms" else 1.0, 5.0, 10.0 if seed or policy == "gorgo" else 12.0)
        for policy in POLICIES
        for scale in TIME_SCALES
        for seed in (1, 0)
    ]
    (table,) = comparison([windows]).tables
    cells = {label[0]: str(shown["How much (95 % interval)"]) for label, shown in table.rows.items()}
    assert cells["Conversations, half load"].startswith(
        "round robin: 10 % sooner (10 to 10 %)<br>session affinity: 10 %"
    )
    assert (
        cells["Conversations, full load"]
        .split("<br>")[2]
        .startswith("gap between tokens: 10 % longer (66 % shorter to ")
    )


def test_a_burst_is_compared_without_queues_with_two_and_as_the_proxy_queues() -> None:
    def runs(default_s: float, published_s: float) -> list[dict[str, Any]]:
        p95_s = {"gorgo-ms": default_s, "gorgo": published_s}
        return [row(policy, 1.0, seed, p95_s[policy], 5.0, 10.0) for policy in p95_s for seed in (0, 1)]

    table, of_the_readme = burst([runs(1.0, 2.0), runs(3.0, 4.0)]).tables
    first = [str(shown[BURST_HEADER[1]]).split("<br>")[0] for shown in table.rows.values()]
    (as_served,) = of_the_readme.rows.values()
    assert as_served["How much (95 % interval)"] == [*table.rows.values()][-1][BURST_HEADER[1]]
    assert first == [
        "first token: 50 % sooner (50 to 50 %)",
        "first token: 25 % sooner (25 to 25 %)",
        "first token: 50 % later (50 to 50 %)",
    ]
