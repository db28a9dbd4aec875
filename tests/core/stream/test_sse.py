from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.core.stream.sse import MAX_EVENT_BYTES, MAX_LINES, SseEvent, SseReader


def read(*chunks: bytes) -> list[SseEvent]:
    reader = SseReader()
    return [event for chunk in chunks for event in reader.feed(chunk)]


@pytest.mark.parametrize("eol", [b"\n", b"\r\n"])
def test_events_end_at_blank_lines(eol: bytes) -> None:
    stream = eol.join([b"event: a", b"data: 1", b"data:2", b"", b"data:  3", b"", b""])
    assert read(stream) == [SseEvent("a", b"1\n2"), SseEvent("", b" 3")]


def test_lone_carriage_returns_end_lines_too() -> None:
    assert read(b"data: 1\rdata: 2\r\rdata: 3\r\r") == [SseEvent("", b"1\n2")]
    assert read(b"data: 1\r\r", b":") == [SseEvent("", b"1")]


def test_comments_ids_and_events_without_data_are_left_out() -> None:
    assert read(b": ping\n\nid: 7\nretry: 10\n\nevent: x\n\ndata\n\n") == [SseEvent("", b"")]


def test_byte_order_mark_is_skipped_once() -> None:
    assert read(b"\xef", b"\xbb\xbfdata: 1\n\n", b"\xef\xbb\xbfdata: 2\n\n") == [SseEvent("", b"1")]


def test_unfinished_event_is_not_told() -> None:
    assert read(b"data: 1\n") == []


def test_name_does_not_outlive_its_event() -> None:
    assert read(b"event: x\n\ndata: 1\n\n") == [SseEvent("", b"1")]


@pytest.mark.parametrize("stream", [b"data: " + b"x" * MAX_EVENT_BYTES, b"data: x\n" * MAX_EVENT_BYTES])
def test_event_that_outgrows_the_bound_stops_the_reader(stream: bytes) -> None:
    reader = SseReader()
    assert reader.feed(b"data: 1\n\n" + stream) == [SseEvent("", b"1")]
    assert reader.overflowed
    assert reader.feed(b"\n\ndata: 2\n\n") == []


@pytest.mark.parametrize(("length", "over"), [(MAX_EVENT_BYTES, False), (MAX_EVENT_BYTES + 1, True)])
@pytest.mark.parametrize("end", [b"\n\n", b""])
def test_a_line_may_be_as_long_as_the_bound_whether_it_has_ended_or_not(length: int, over: bool, end: bytes) -> None:
    """A last byte that may be half of an end of line is not counted."""
    reader = SseReader()
    line = b"data: " + b"x" * (length - 6)
    events = reader.feed(line + end) + reader.feed(b"" if end else b"\n\n")
    assert (reader.overflowed, [len(event.data) for event in events]) == (over, [] if over else [length - 6])


def test_a_byte_that_may_be_half_of_an_end_of_line_is_not_counted() -> None:
    reader = SseReader()
    assert reader.feed(b"data: " + b"x" * (MAX_EVENT_BYTES - 6) + b"\r") == []
    assert not reader.overflowed
    assert len(reader.feed(b"\n\r\n")) == 1


def test_lines_of_one_event_count_together_and_those_of_the_next_anew() -> None:
    half = b"data: " + b"x" * (MAX_EVENT_BYTES // 2 - 6) + b"\n"
    reader = SseReader()
    assert len(reader.feed(half + half + b"\n" + half + half + b"\n")) == 2
    assert reader.feed(half + half + b"data:\n\n") == []
    assert reader.overflowed


def test_a_stream_may_begin_with_an_empty_line() -> None:
    assert read(b"\ndata: 1\n\n") == read(b"\r\ndata: 1\n\n") == [SseEvent("", b"1")]


def test_one_space_after_the_colon_is_not_part_of_a_value() -> None:
    assert read(b"event:  x\ndata:1\ndata: 2\ndata:  3\n\n") == [SseEvent(" x", b"1\n2\n 3")]


def test_a_name_that_is_no_utf_8_is_read_with_replacement_characters() -> None:
    assert read(b"event: \xff\ndata: 1\n\n") == [SseEvent("\ufffd", b"1")]


def test_a_reader_that_was_stopped_reads_nothing_again() -> None:
    reader = SseReader()
    assert reader.feed(b":\n\n" + b"data: x\n" * MAX_EVENT_BYTES) == []
    assert reader.overflowed
    assert reader.feed(b"\n") == []


def test_comments_are_not_kept_and_endless_ones_not_read() -> None:
    reader = SseReader()
    for _ in range(MAX_LINES):
        reader.feed(b": " + b"x" * 1000 + b"\n")
        assert not reader.overflowed
    assert reader.feed(b":\ndata: 1\n\n") == []
    assert reader.overflowed


PIECES = st.sampled_from(
    [
        b"data",
        b"data: 1",
        b"data:",
        b"event: e",
        b":",
        b"x",
        b"\n",
        b"\n\n",
        b"\r",
        b"\r\n",
        b"\r\n\r\n",
        b"\xef\xbb\xbf",
    ]
)


@given(pieces=st.lists(PIECES, max_size=20), cuts=st.lists(st.integers(0, 100), max_size=6))
def test_split_anywhere_gives_the_same_events(pieces: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(pieces)
    edges = [0, *sorted(cuts), len(stream)]
    whole = read(stream)
    assert read(*(stream[a:b] for a, b in pairwise(edges))) == whole
    assert read(*(stream[k : k + 1] for k in range(len(stream)))) == whole
