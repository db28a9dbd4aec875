"""Plain aligned tables."""

from __future__ import annotations

import pytest

from gorgo.cli.tables import table


def test_text_goes_left_numbers_right_and_unknown_is_a_dash() -> None:
    shown = table(["name", "ms", "n"], [["a", 2.04, 12345], ["long", None, 1]])
    assert shown.splitlines() == ["name   ms       n", "a     2.0  12,345", "long    -       1"]


@pytest.mark.parametrize(
    ("cell", "shown"),
    [
        (1000.0, "1,000"),
        (-1000.0, "-1,000"),
        (999.0, "999.0"),
        (1000.5, "1,000.5"),
        (0.0, "0.0"),
        (12345, "12,345"),
        ("12345", "12345"),
        (None, "-"),
    ],
)
def test_a_large_whole_number_has_no_decimals(cell: float | str | None, shown: str) -> None:
    assert table(["x"], [[cell]]).split() == ["x", shown]


def test_a_column_with_a_word_goes_left() -> None:
    assert table(["long head", "n"], [["a", 1], [None, "word"]]).splitlines() == [
        "long head  n",
        "a          1",
        "-          word",
    ]


def test_no_rows_leave_the_header() -> None:
    assert table(["a", "b"], []) == "a  b"
