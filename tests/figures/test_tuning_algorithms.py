from __future__ import annotations

from typing import Any

import pytest

from tests.figures.table import FIGURES
from tests.figures.tuning_algorithms import COMMAND, tuning_algorithms


def statement(text: str, note: str) -> dict[str, Any]:
    return {"text": text, "value": 0.9, "low": 0.8, "high": 1.0, "note": note}


def test_a_row_per_algorithm_has_its_ratios_and_how_often_it_moved() -> None:
    one = statement("a, b: gorgo searched by cma, 16 candidates / start, p95 TTFT", "p95 E2E 0.931; moved in 4 of 10")
    (table,) = tuning_algorithms([[one]]).tables
    assert table.rows == {("`cma`",): {"p95 TTFT": [0.9, 0.8, 1.0], "p95 E2E": 0.931, "moved": "4 of 10"}}
    assert FIGURES["tuning-algorithms"].commands == [COMMAND]


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("something else", "p95 E2E 0.931; moved in 4 of 10"),
        ("a, b: gorgo searched by cma, 16 candidates / start, p95 TTFT", "nothing"),
    ],
)
def test_another_statement_is_an_error_that_quotes_it(text: str, note: str) -> None:
    with pytest.raises(AssertionError, match=r"about an algorithm: (something else|nothing)"):
        tuning_algorithms([[statement(text, note)]])
