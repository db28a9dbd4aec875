""""""

from __future__ import annotations

import pytest

from gorgo.errors import TraceError
from gorgo.lab.traces import parse_window
from gorgo.lab.traces.filters import REORDER_SLACK_S, TraceFilters, parse_offset, scheduled_s
from gorgo.lab.traces.rows import TraceRequest


def at(index: int, timestamp_s: float, *, tokens: int = 10, output: int = 100) -> TraceRequest:
    return TraceRequest(index, timestamp_s, tokens, output)


def kept(filters: TraceFilters, *requests: TraceRequest) -> list[tuple[int, float]]:
    return [(request.index, request.timestamp_s) for request in filters.apply(requests)]


def test_the_first_kept_request_is_at_zero() -> None:
    assert kept(TraceFilters(), at(0, 300.0), at(1, 301.5)) == [(0, 0.0), (1, 1.5)]


def test_a_window_counts_from_the_first_request_of_the_file() -> None:
    week_s = 4 * 86_400.0
    requests = [at(n, week_s + n) for n in range(10)]
    assert kept(TraceFilters(start_s=3, end_s=5), *requests) == [(3, 0.0), (4, 1.0)]


def test_a_request_a_little_out_of_order_is_not_lost_and_reading_stops_soon_after_the_end() -> None:
    def file() -> object:
        yield at(0, 0.0)
        yield at(1, 6.0)
        yield at(2, 4.0)
        yield at(3, 5.0 + REORDER_SLACK_S)
        raise AssertionError("read on")

    assert [r.index for r in TraceFilters(end_s=5).apply(file())] == [0, 2]  # type: ignore[arg-type]


def test_limit_counts_what_max_input_left_and_reads_no_further() -> None:
    def file() -> object:
        yield at(0, 0.0, tokens=99)
        yield at(1, 1.0)
        yield at(2, 2.0)
        raise AssertionError("read on")

    filters = TraceFilters(max_input=50, limit=2)
    assert [r.index for r in filters.apply(file())] == [1, 2]  # type: ignore[arg-type]


def test_max_output_caps_and_drops_nothing() -> None:
    requests = TraceFilters(max_output=50).apply([at(0, 0.0, output=20), at(1, 1.0, output=70)])
    assert [request.output_tokens for request in requests] == [20, 50]


def test_min_output_makes_short_answers_longer_and_the_cap_wins() -> None:
    requests = TraceFilters(min_output=60).apply([at(0, 0.0, output=20), at(1, 1.0, output=70)])
    assert [request.output_tokens for request in requests] == [60, 70]
    (capped,) = TraceFilters(min_output=60, max_output=50).apply([at(0, 0.0, output=20)])
    assert capped.output_tokens == 50


def test_spread_moves_only_equal_stamps_and_is_seeded() -> None:
    requests = [at(0, 0.0), at(1, 3.0), at(2, 3.0), at(3, 3.0), at(4, 6.0)]
    first = kept(TraceFilters(spread_s=3, seed=7), *requests)
    assert first == kept(TraceFilters(spread_s=3, seed=7), *requests)
    assert first != kept(TraceFilters(spread_s=3, seed=8), *requests)
    times = dict(first)
    assert (times[0], times[4]) == (0.0, 6.0)
    assert all(3 <= times[index] < 6 for index in (1, 2, 3))
    assert len({times[index] for index in (1, 2, 3)}) == 3
    assert [time for _, time in first] == sorted(time for _, time in first)


def test_equal_times_keep_the_order_of_the_file() -> None:
    assert kept(TraceFilters(), at(0, 5.0), at(1, 2.0), at(2, 2.0)) == [(1, 0.0), (2, 0.0), (0, 3.0)]


def test_twice_the_time_scale_is_half_the_load() -> None:
    assert scheduled_s(at(0, 1.5), 2.0) == 3.0


@pytest.mark.parametrize(("text", "seconds"), [("90", 90.0), ("1.5", 1.5), ("02:03", 123.0), ("16:15:00", 58_500.0)])
def test_offsets_are_seconds_or_clock_like(text: str, seconds: float) -> None:
    assert parse_offset(text) == seconds


@pytest.mark.parametrize("text", ["", "x", "-1", "1:60", "1:2:3:4", "nan", "inf", "1:-2"])
def test_other_offsets_are_refused(text: str) -> None:
    with pytest.raises(TraceError, match="expected seconds, MM:SS or HH:MM:SS"):
        parse_offset(text)


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
