"""How figures are written, on both sides of each change of unit."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gorgo.formatting import age, clock, count, moment, ms, number, share, signed_ms
from gorgo.live.admin.page.charts import box_line, nice_top, probe_line, term_bar


@pytest.mark.parametrize(
    ("write", "value", "text"),
    [
        (ms, 0.0, "0.0"),
        (ms, 9.94, "9.9"),
        (ms, 10.0, "10"),
        (ms, -9.94, "-9.9"),
        (ms, -10.0, "-10"),
        (ms, 999.6, "1,000"),
        (signed_ms, 0.0, "+0.0"),
        (signed_ms, -0.04, "-0.0"),
        (signed_ms, 1234.0, "+1,234"),
        (count, 0, "0"),
        (count, 9_999, "9,999"),
        (count, 10_000, "10.0k"),
        (count, 99_900, "99.9k"),
        (count, 100_000, "100k"),
        (count, 999_000, "999k"),
        (count, 1_000_000, "1.0M"),
        (count, -10_000, "-10.0k"),
        (share, 0.0, "0 %"),
        (share, 0.099, "9.9 %"),
        (share, 0.1, "10 %"),
        (share, 1.0, "100 %"),
        (age, 0.0, "0 s"),
        (age, 119.0, "119 s"),
        (age, 120.0, "2 min"),
        (age, 7_140.0, "119 min"),
        (age, 7_200.0, "2.0 h"),
        (age, 172_700.0, "48.0 h"),
        (age, 172_800.0, "2.0 d"),
        (clock, 86_399.9, "23:59:59"),
        (moment, "2026-05-01T12:03:04+00:00", "2026-05-01 12:03:04"),
        (number, 0.5, "0.5"),
        (number, 2.0, "2"),
    ],
)
def test_figure_is_written_in_its_unit(write: Callable[[object], str], value: object, text: str) -> None:
    assert write(value) == text


@pytest.mark.parametrize(
    ("value", "top"),
    [(0.0, 1.0), (1.0, 1.0), (1.01, 2.0), (2.5, 3.0), (4.0, 4.0), (4.1, 6.0), (6.1, 8.0), (8.1, 10.0), (100.1, 200.0)],
)
def test_top_of_a_chart_is_the_next_round_number(value: float, top: float) -> None:
    assert nice_top(value) == top


@pytest.mark.parametrize(
    ("value", "low", "high", "x"),
    [
        (0.5, 0.0, 1.0, "48.5"),
        (0.0, 0.0, 1.0, "0.0"),
        (1.0, 0.0, 1.0, "97.0"),
        (-5.0, 0.0, 1.0, "0.0"),
        (9.0, 0.0, 1.0, "97.0"),
        (0.1, 0.0, 1.0, "8.5"),
        (7.0, 7.0, 7.0, "48.5"),
    ],
)
def test_weight_is_drawn_where_it_lies_in_its_box(value: float, low: float, high: float, x: str) -> None:
    assert f'x="{x}"' in box_line(value, low, high)


def test_terms_are_drawn_side_by_side_and_what_is_not_positive_is_left_out() -> None:
    bar = term_bar([10.0, 0.0, -5.0, 30.0], 40.0)
    assert bar.count("<path") == 2
    assert '<path class="t0" d="M0.0 0h25.0v100h-25.0z"/>' in bar
    assert '<path class="t3" d="M25.0 0h75.0v100h-75.0z"/>' in bar
    assert "<path" not in term_bar([1.0], 0.0)
    assert 'class="t0"' in term_bar([0.0] * 6 + [1.0], 1.0), "the seventh has the first one's colour"


def test_line_of_probes_marks_those_that_failed_and_needs_two() -> None:
    assert probe_line(((0.0, 0.02),)) == ""
    line = probe_line(((0.0, 0.020), (30.0, None), (60.0, 0.040)))
    assert "3 probes in 60 s: 20 to 40 ms, 1 failed" in line
    assert line.count('class="failed"') == 1
    assert 'd="M1.5 100V60"' in line
    # 20 ms at the foot, 40 ms at the top; each stands alone.
    assert 'd="M0.2 100.0H0.5M2.2 0.0H2.5"' in line
    assert "2 probes in 30 s: none answered, 2 failed" in probe_line(((0.0, None), (30.0, None)))


def test_round_trips_that_hardly_move_are_a_calm_line_in_the_middle() -> None:
    # A fifth of 100 ms is 20 ms, from 88 to 110: 98 and 100 lie 45 and 55 % up.
    assert 'd="M0.2 55.0H0.5L1.5 45.0"' in probe_line(((0.0, 0.098), (30.0, 0.1)))
