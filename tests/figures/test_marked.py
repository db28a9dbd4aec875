"""Marks and comparison, on pages made up here: each kind of wrong figure is found, and words around may be any."""

from __future__ import annotations

import pytest

from tests.figures.marked import Table, View, agrees, numbers_of, parts_of, problems, tables_outside

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
