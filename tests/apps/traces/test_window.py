from __future__ import annotations

import pytest

from gorgo.apps.traces import parse_window
from gorgo.errors import TraceError


def test_dates_are_offsets_from_the_week_s_beginning() -> None:
    hours = 4 * 24 + 16.25
    assert parse_window("2026-04-05T16:15", "2026-04-05T16:45") == (hours * 3600, (hours + 0.5) * 3600, True)


def test_a_date_alone_is_its_midnight() -> None:
    assert parse_window(None, "2026-04-02") == (0.0, 86400.0, True)


def test_zones_count_where_they_are_told() -> None:
    assert parse_window("2026-04-01T02:00+02:00", None)[0] == 0


def test_offsets_count_from_the_first_request() -> None:
    assert parse_window("01:30", "1:00:00") == (90.0, 3600.0, False)
    assert parse_window(None, None) == (0.0, None, False)


@pytest.mark.parametrize(
    ("start", "end", "said"),
    [
        ("2026-04-05T16:15", "90", "expected two offsets or two dates"),
        ("2026-03-05T16:15", None, "lies before 2026-04-01T00:00, the date of time stamp 0"),
        ("2026-13-05", None, "'2026-13-05' is no date and time; expected one like"),
        ("90", "80", "expected an end after its start"),
        ("-5", None, "no offset within a trace"),
    ],
)
def test_windows_that_cannot_be_are_refused(start: str, end: str | None, said: str) -> None:
    with pytest.raises(TraceError, match=said):
        parse_window(start, end)
