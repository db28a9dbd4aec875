"""Plain aligned tables."""

from __future__ import annotations

from gorgo.cli.tables import table


def test_text_goes_left_numbers_right_and_unknown_is_a_dash() -> None:
    shown = table(["name", "ms", "n"], [["a", 2.04, 12345], ["long", None, 1]])
    assert shown.splitlines() == ["name   ms       n", "a     2.0  12,345", "long    -       1"]


def test_no_rows_leave_the_header() -> None:
    assert table(["a", "b"], []) == "a  b"
