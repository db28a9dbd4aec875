"""The view of the relay's figures: a row per figure of the issue, a column per stage of a load."""

from __future__ import annotations

from typing import Any

from tests.bench.relay.report import MEASURES
from tests.figures.marked import problems
from tests.figures.relay import COMMANDS, ROWS, page_part, relay
from tests.figures.table import FIGURES


def results() -> list[Any]:
    spread = {"median": 12.5, "least": 12.0, "most": 13.0}
    measures = [
        {
            "name": measure.name,
            "unit": measure.unit,
            "relays": {"gorgo": spread, "nginx": spread},
            "ratios": {"gorgo": 1.25},
        }
        for measure in MEASURES
    ]
    stages = {"floor": {"read": 3.0, "write": 4.0}, "gorgo": {"read": 5.0, "write": 6.5}}
    loads = ("requests_small", "requests_large", "events")
    return [
        {"measures": measures, "rounds": 4, "machine": "AMD EPYC, 2 cores, Linux"},
        {"stages_us": dict.fromkeys(loads, stages)},
    ]


def test_every_row_is_of_measures_that_the_benchmark_makes() -> None:
    assert {name for names, _ in ROWS.values() for name in names} <= {measure.name for measure in MEASURES}


def test_the_page_says_what_is_stored_and_another_number_is_a_problem() -> None:
    view = relay(results())
    page = page_part(view, "AMD EPYC, 2 cores, Linux 6.1")
    assert "| CPU per event of 64 endless streams, microseconds | 12 |  |  | 12 |" in page
    assert "| sum | 12 | 12 | 12 | 7.00 |" in page
    stored = FIGURES["relay"].view(results())
    assert problems(page, stored) == []
    assert problems(page.replace("7.00", "7.01"), stored) != []
    assert FIGURES["relay"].commands == COMMANDS
