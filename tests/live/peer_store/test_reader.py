"""Entries of several streams, in the order in which the store took them, whatever the size of pages."""

from __future__ import annotations

import random

import pytest

from gorgo.live.peer_store import reader as incoming
from gorgo.live.peer_store.reader import EntryId, Incoming, read_id

Streams = dict[str, list[EntryId]]


def read(reader: Incoming, streams: Streams) -> list[tuple[EntryId, str]]:
    """Read once and return what is applied."""
    found = {}
    for member, position in reader.positions().items():
        newer = [entry_id for entry_id in streams[member] if entry_id > position]
        found[member] = [(entry_id, b"report") for entry_id in newer[: incoming.PAGE]]
    reader.add(found)
    return [(entry.id, entry.member) for entry in reader.take_entries()]


@pytest.mark.parametrize("seed", range(20))
def test_history_of_all_streams_is_applied_in_one_order_and_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming, "PAGE", 3)
    rng = random.Random(seed)
    streams: Streams = {
        f"eu-{number}": sorted({EntryId(rng.randint(1, 60), rng.randint(0, 2)) for _ in range(rng.randint(0, 30))})
        for number in range(4)
    }
    reader = Incoming()
    reader.follow(streams, now_ms=100, since_ms=0)
    applied = read(reader, streams)
    for _ in range(200):
        if not reader.behind:
            break
        applied += read(reader, streams)
    assert not reader.behind
    assert applied == sorted((entry_id, member) for member, ids in streams.items() for entry_id in ids)


def test_a_new_member_is_read_from_the_history_and_one_that_left_no_more() -> None:
    reader = Incoming()
    streams: Streams = {"a": [EntryId(5, 0), EntryId(50, 0)], "b": [EntryId(60, 0)]}
    reader.follow(["a"], now_ms=100, since_ms=10)
    assert read(reader, streams) == [(EntryId(50, 0), "a")]
    reader.follow(["b"], now_ms=101, since_ms=11)
    assert read(reader, streams) == [(EntryId(60, 0), "b")]
    assert list(reader.positions()) == ["b"]


def test_a_position_ahead_of_the_stores_clock_starts_anew() -> None:
    """The store was replaced by one whose clock is behind."""
    reader = Incoming()
    streams: Streams = {"a": [EntryId(90_000, 0)]}
    reader.follow(["a"], now_ms=90_000, since_ms=0)
    assert len(read(reader, streams)) == 1
    streams["a"] = [EntryId(10_000, 0)]
    assert read(reader, streams) == []
    reader.follow(["a"], now_ms=89_500, since_ms=0)  # within what clocks differ by
    assert read(reader, streams) == []
    reader.follow(["a"], now_ms=10_000, since_ms=0)
    assert read(reader, streams) == [(EntryId(10_000, 0), "a")]


def test_at_most_a_page_of_each_stream_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming, "PAGE", 2)
    reader = Incoming()
    streams: Streams = {"busy": [EntryId(ms, 0) for ms in range(1, 9)], "late": [EntryId(100, 0), EntryId(101, 0)]}
    reader.follow(streams, now_ms=200, since_ms=0)
    assert [entry_id.ms for entry_id, _ in read(reader, streams)] == [1, 2]
    # The entries of the other stream wait, so that it is not read.
    assert list(reader.positions()) == ["busy"]


def test_id_without_a_number_is_the_first_of_its_time() -> None:
    assert read_id(b"7") == EntryId(7, 0)
