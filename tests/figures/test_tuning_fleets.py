"""The view of the tuner's fleets: a row per fleet, each number held against the page."""

from __future__ import annotations

from typing import Any

import pytest

from tests.figures.marked import problems
from tests.figures.table import FIGURES
from tests.figures.tuning_fleets import COMMAND, MORE_COMMAND, tuning_fleets, tuning_fleets_more

PAGE = """\
<!-- figures: tuning-fleets -->
| fleet, traffic | policy | after tuning, p95 TTFT | while tuning, p95 E2E | accepted after | weights in the end |
|---|---|---|---|---|---|
| small, chat | `gorgo` | 0.25 [0.20, 0.31] | 0.90 | 1.0 h, 2.0 h | w_rtt 4 |
<!-- /figures -->
"""


def statement(text: str, value: float, note: str = "", low: float | None = None, high: float | None = None) -> Any:
    return {"text": text, "value": value, "low": low, "high": high, "note": note, "met": value < 0.9 or None}


def results() -> list[Any]:
    of, meanwhile = "small, chat, time scale 3: gorgo", "first accepted after 1.0 h, 2.0 h"
    return [
        [
            statement(f"{of}, tuned live / defaults, p95 TTFT", 0.251, "w_rtt 4; w_rtt 4", 0.203, 0.312),
            statement(f"{of}, tuned live / defaults, p95 E2E", 0.93, "w_rtt 4"),
            statement(f"{of}, while it was tuned / defaults, p95 TTFT", 0.601, meanwhile),
            statement(f"{of}, while it was tuned / defaults, p95 E2E", 0.9, meanwhile),
        ]
    ]


def test_the_page_shows_what_is_stored_and_another_number_is_a_problem() -> None:
    view = tuning_fleets(results())
    assert problems(PAGE, view) == []
    for shown, other in (("0.25 [", "0.26 ["), ("2.0 h", "3.0 h"), ("0.31]", "0.32]"), ("0.90", "0.91")):
        assert problems(PAGE.replace(shown, other), view) != [], shown
    assert (view.values["fleets"], view.values["passed"]) == (1, 2)
    assert FIGURES["tuning-fleets"].commands == [COMMAND]


def test_another_statement_is_an_error_that_quotes_it() -> None:
    with pytest.raises(ValueError, match="'else' is no statement"):
        tuning_fleets([[*results()[0], statement("else", 1.0)]])


def test_a_searched_fleet_has_the_twin_and_the_grid() -> None:
    of = "small, chat, time scale 3: gorgo"
    found = [
        [
            statement(f"{of}, found by the twin / defaults, p95 TTFT", 0.31, "w_rtt 4"),
            statement(f"{of}, best of the grid / defaults, p95 TTFT", 0.24, "w_rtt 20"),
        ]
    ]
    page = """\
<!-- figures: tuning-fleets-more -->
| fleet, traffic | policy | searched on a twin, p95 TTFT | best of a grid, p95 TTFT |
|---|---|---|---|
| small, chat | `gorgo` | 0.31 | 0.24 |
<!-- /figures -->
"""
    view = tuning_fleets_more(found)
    assert problems(page, view) == []
    assert problems(page.replace("0.31", "0.24"), view) != []
    assert view.values["seeds"] == 1
    assert FIGURES["tuning-fleets-more"].commands == [MORE_COMMAND]
