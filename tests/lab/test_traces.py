"""Traces: files that load, rows, and filters of them."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.errors import TraceError
from gorgo.lab import traces as loading
from gorgo.lab.datasets import own_block_tokens
from gorgo.lab.prompt_text import (
    BLOCK_BYTES,
    beginning,
    block_text,
    is_keyed,
    largest_share,
    prompt_text,
    request_text,
    warning,
)
from gorgo.lab.traces import (
    MAX_VALUES,
    REORDER_SLACK_S,
    TraceFilters,
    TraceRequest,
    load_trace,
    next_turns,
    parse_offset,
    parse_window,
    read_row,
    scheduled_s,
)
from gorgo.lab.traces import TraceRequest as TraceRequest_traces
from gorgo.policies.registry import POLICIES, make_policy


def lines(*stamps: int) -> bytes:
    rows = ({"timestamp": t, "input_length": 10, "output_length": 1, "hash_ids": [t]} for t in stamps)
    return b"\n".join(json.dumps(row).encode() for row in rows) + b"\n"


def test_gzip_is_told_by_its_first_bytes_not_its_name(tmp_path: Path) -> None:
    plain, packed = tmp_path / "a.gz", tmp_path / "b.jsonl"
    plain.write_bytes(lines(0, 10))
    packed.write_bytes(gzip.compress(lines(0, 10)))
    assert load_trace(plain) == load_trace(packed)


@pytest.mark.parametrize("pack", [bz2.compress, lzma.compress])
def test_bzip2_and_xz_are_read_and_damage_is_named(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    plain, packed = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    plain.write_bytes(lines(0, 10))
    packed.write_bytes(pack(lines(0, 10)))
    assert load_trace(plain) == load_trace(packed)
    for damaged in (pack(lines(*range(500)))[:-20], pack(b"x")[:8] + b"nonsense" * 9):
        packed.write_bytes(damaged)
        with pytest.raises(TraceError, match=r"b.jsonl: damaged (bzip2|xz) file \("):
            load_trace(packed)


def test_zstd_is_named_with_what_unpacks_it(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd\x04\x58")
    with pytest.raises(TraceError, match=r"t.jsonl.zst: compressed by zstd; expected .*`zstd -d` unpacks it"):
        load_trace(path)


def test_a_byte_order_mark_before_the_first_line_is_no_part_of_it(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + lines(0, 10))
    assert [one.timestamp_s for one in load_trace(path)] == [0.0, 0.01]
    path.write_bytes(lines(0) + b"\xef\xbb\xbf" + lines(10))
    with pytest.raises(TraceError, match="line 2"):
        load_trace(path)


def test_ids_of_another_size_are_counted_by_it(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 131, "output_length": 1, "hash_ids": [1, 2, 3, 4, 5, 6, 7, 8, 9]}\n'
    )
    with pytest.raises(TraceError, match=r"expected 1 ids for .*one per 512 tokens\), not 9; --block-tokens names"):
        load_trace(path)
    assert load_trace(path, block_tokens=16)[0].hash_ids == tuple(range(1, 10))
    body = {"messages": [{"role": "user", "content": "a"}]}
    path.write_text(json.dumps({"timestamp": 0, "input_length": 9, "output_length": 1, "request": body}))
    with pytest.raises(TraceError, match="no body in a trace whose ids are of 16 tokens"):
        load_trace(path, block_tokens=16)


def test_empty_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"\n" + lines(0) + b"\n{}\n")
    with pytest.raises(TraceError, match=r"t.jsonl, line 4: input_length is missing"):
        load_trace(path)


def test_a_bad_line_behind_the_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(lines(0) + b"nonsense\n")
    assert len(load_trace(path, TraceFilters(limit=1))) == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no request is left"),
        (b"\x1f\x8bnonsense", "damaged gzip file"),
        (gzip.compress(lines(0, 1, 2), mtime=0)[:-12], "damaged gzip file"),
        (b"\xff\xfe\n", "line 1: not UTF-8"),
    ],
)
def test_a_file_that_is_no_trace_is_one_clear_error(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=said):
        load_trace(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"nowhere.jsonl: No such file"):
        load_trace(tmp_path / "nowhere.jsonl")


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TraceError, match=r"pipe: a pipe; expected a file"):
        load_trace(tmp_path / "pipe")


def test_a_trace_of_more_than_a_year_is_a_slip_of_units(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(lines(5, 366 * 86_400_000 + 5))
    assert len(load_trace(path)) == 2
    path.write_bytes(lines(5, 366 * 86_400_000 + 1005))
    with pytest.raises(TraceError, match=r"t.jsonl, line 2: 31,622,401 s from the first request; expected"):
        load_trace(path)


def test_filters_that_leave_nothing_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(lines(0))
    with pytest.raises(TraceError, match="no request is left after the filters"):
        load_trace(path, TraceFilters(max_input=5))


def test_a_file_of_blank_lines_is_given_up_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    blank = b" " * 1023 + b"\n"
    path.write_bytes(gzip.compress(lines(0) + blank * 2048))
    with pytest.raises(TraceError, match=r"t.jsonl.gz, line 1026: over 1,048,576 .*; expected JSON lines"):
        load_trace(path)
    path.write_bytes(gzip.compress(lines(0) + blank * 1024 + lines(1) + blank * 1024))
    assert len(load_trace(path)) == 2


# text
def test_the_text_of_a_block_never_changes() -> None:
    """Other machines and later versions must make the same prompts: results are compared across them."""
    assert block_text(0)[:32] == b"nos pit den bes wir bat ton rar "


@given(st.integers(1, 5000))
def test_a_prompt_has_four_ascii_bytes_a_token(tokens: int) -> None:
    text = prompt_text(range(-(-tokens // 512)), tokens)
    assert len(text) == 4 * tokens
    assert text.isascii()


@given(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.lists(st.integers(0, 3), min_size=1, max_size=4))
def test_prompts_share_exactly_the_blocks_that_their_ids_share(left: list[int], right: list[int]) -> None:
    texts = [prompt_text(ids, 512 * len(ids)) for ids in (left, right)]
    for number, (a, b) in enumerate(zip(left, right, strict=False)):
        part = slice(number * BLOCK_BYTES, (number + 1) * BLOCK_BYTES)
        assert (texts[0][part] == texts[1][part]) == (a == b)


def test_an_id_may_be_any_integer() -> None:
    assert len({prompt_text([hash_id], 512) for hash_id in (-1, 0, 2**64, 2**64 + 1)}) == 4


def test_what_no_id_covers_is_shared_with_nobody() -> None:
    one, other = (request_text(TraceRequest(index, 0.0, 600, 1, (5,))) for index in (1, 2))
    assert one[:BLOCK_BYTES] == other[:BLOCK_BYTES]
    assert one[BLOCK_BYTES:] != other[BLOCK_BYTES:]
    assert len(one) == 2400


def test_session_affinity_alone_is_keyed_by_the_session() -> None:
    assert [name for name in POLICIES if is_keyed(make_policy(name))] == ["simple-session-affinity"]


def asked(number: int, text: str) -> TraceRequest_traces:
    return TraceRequest_traces(number, 0.0, 10, 1, (), {"messages": [{"role": "user", "content": text}]})


def test_requests_begin_alike_by_their_first_block_or_by_their_first_256_tokens() -> None:
    ids = [TraceRequest_traces(number, 0.0, 2000, 1, (7, 100 + number)) for number in range(3)]
    assert largest_share(map(beginning, [*ids, TraceRequest_traces(9, 0.0, 2000, 1, (8,))])) == 0.75
    system = "You are a helpful assistant. " * 50
    assert largest_share(map(beginning, [asked(0, system + "a"), asked(1, system + "b")])) == 1.0
    assert largest_share(map(beginning, [asked(0, "a"), asked(1, "b")])) == 0.5
    assert largest_share(map(beginning, [TraceRequest_traces(n, 0.0, 9, 1) for n in range(4)])) == 0.25
    assert largest_share([]) == 0.0


@pytest.mark.parametrize("share", [None, 0.0, 0.5])
def test_keys_that_are_spread_are_nothing_to_warn_of(share: float | None) -> None:
    assert warning("p", share) is None


def test_a_key_of_most_requests_is_warned_of() -> None:
    assert (warning("p", 1.0) or "").startswith(
        "p: no request has a session id and 100% begin with the same tokens: they share one key"
    )


# A file as ART-Chat-2.5M is described, made by hand: stamps count from the week's first request, bodies are told.
DAY_S = 86_400


def row(time_s: float, *, turns: int = 2) -> dict[str, Any]:
    talk = [{"role": role, "content": "words"} for _ in range(turns) for role in ("user", "assistant")][:-1]
    return {
        "response": None,
        "request": {"messages": [{"role": "system", "content": "be"}, *talk], "model": "m"},
        "hash_ids": ["91a", "17"],
        "output_length": 300,
        "timestamp": time_s * 1000,
        "system_prompt_hash": "s",
        "input_length": 900,
        "token_hash": f"user {time_s % 2:.0f}",
    }


@pytest.fixture
def day_5(tmp_path: Path) -> Path:
    """A request a minute from 16:00 to 17:00 on April 5; then a line that must never be read."""
    stamps = [4 * DAY_S + 16 * 3600 + minute * 60 for minute in range(61)]
    path = tmp_path / "artchat_week_20260405.jsonl"
    path.write_text("".join(json.dumps(row(stamp)) + "\n" for stamp in stamps) + "nonsense\n")
    return path


def window(start: str, end: str) -> TraceFilters:
    start_s, end_s, from_zero = parse_window(start, end)
    return TraceFilters(start_s=start_s, end_s=end_s, from_zero=from_zero, max_output=128)


def test_a_window_by_date_is_cut_out_of_a_day_and_begins_at_0(day_5: Path) -> None:
    requests = load_trace(day_5, window("2026-04-05T16:15", "2026-04-05T16:45"))
    assert [request.timestamp_s for request in requests] == [60.0 * minute for minute in range(30)]
    assert [request.index for request in requests] == list(range(15, 45))
    assert {request.turns for request in requests} == {2}
    assert {request.output_tokens for request in requests} == {128}


def test_reading_stops_behind_the_window(day_5: Path) -> None:
    load_trace(day_5, window("2026-04-05T16:15", "2026-04-05T16:45"))
    with pytest.raises(TraceError, match="line 62: 'nonsense' is not JSON"):
        load_trace(day_5, window("2026-04-05T16:15", "2026-04-05T17:30"))


def test_an_offset_counts_from_the_file_s_first_request_all_the_same(day_5: Path) -> None:
    requests = load_trace(day_5, TraceFilters(start_s=900, end_s=2700))
    assert requests[0].index == 15


def test_another_day_s_file_has_nothing_of_the_window(day_5: Path) -> None:
    with pytest.raises(TraceError, match="no request is left"):
        load_trace(day_5, window("2026-04-04T16:15", "2026-04-04T16:45"))


def test_only_what_is_kept_is_ever_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file's lines are drawn one by one: at any time few beyond the kept ones have been asked for."""
    drawn: list[int] = []

    def endless(path: Path) -> Iterator[str]:
        minute = 0
        while True:
            drawn.append(minute)
            yield json.dumps(row(4 * DAY_S + minute * 60))
            minute += 1

    monkeypatch.setattr(loading, "_lines", endless)
    assert len(load_trace("week.jsonl", window("2026-04-05T00:10", "2026-04-05T00:20"))) == 10
    assert len(drawn) <= 23


def test_a_line_without_end_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "LINE_BYTES_MAX", 1000)
    path = tmp_path / "t.jsonl"
    path.write_text("x" * 5000)
    with pytest.raises(TraceError, match="line 1: over 1,000 bytes; expected JSON lines"):
        load_trace(path)


GOOD: dict[str, Any] = {"timestamp": 1500, "input_length": 600, "output_length": 7, "hash_ids": [3, 9]}


def read(row: object) -> TraceRequest:
    return read_row(json.dumps(row), file="t.jsonl", line_number=4, index=2)


def test_a_mooncake_row_is_read() -> None:
    assert read(GOOD) == TraceRequest(2, 1.5, 600, 7, (3, 9), None)


def test_unknown_keys_and_fractions_of_a_millisecond_are_no_error() -> None:
    request = read({"user": "x", **GOOD, "timestamp": 0.25, "turn": None})
    assert request.timestamp_s == 0.00025


def test_string_ids_are_numbers_or_hashes_of_their_text() -> None:
    digits, other, same = (read({**GOOD, "hash_ids": ids}).hash_ids for ids in (["3", "9"], ["3", "ab"], ["3", "ab"]))
    assert digits == (3, 9)
    assert other == same != digits


def test_half_a_surrogate_pair_is_an_id_as_any_text() -> None:
    ids = read({**GOOD, "hash_ids": ["\ud800", "\udfff"]}).hash_ids
    assert len(set(ids)) == 2


def test_turns_beyond_all_numbers_are_not_told() -> None:
    assert read({**GOOD, "turn": 10**400}).turns is None


def test_a_row_with_a_body_needs_no_ids() -> None:
    body = {"messages": [{"role": "user", "content": "hello"}]}
    row = {"timestamp": 0, "input_length": 5000, "output_length": 1, "request": body}
    assert read(row).body == body
    assert read({**row, "hash_ids": ["a"]}).hash_ids == read({**row, "hash_ids": ["a"]}).hash_ids


def test_ids_of_full_blocks_alone_are_taken() -> None:
    assert read({**GOOD, "hash_ids": [3]}).hash_ids == (3,)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"timestamp": None}, "timestamp is null; expected milliseconds, at least 0"),
        ({"timestamp": -1}, "timestamp is -1; expected"),
        ({"timestamp": True}, "timestamp is true; expected"),
        ({"timestamp": float("nan")}, "timestamp is NaN; expected"),
        ({"timestamp": 10**400}, "timestamp is 1000"),
        ({"input_length": 0}, "input_length is 0; expected a whole number of tokens, at least 1"),
        (
            {"input_length": 10_000_001},
            "input_length is 10000001; expected a whole number of tokens",
        ),
        ({"output_length": 2**53}, "output_length is 9007199254740992; expected a whole number of tokens"),
        ({"input_length": 600.5}, "input_length is 600.5; expected"),
        ({"output_length": "7"}, "output_length is '7'; expected"),
        ({"hash_ids": None}, "hash_ids is null; expected a list of ids"),
        ({"hash_ids": [1, 2, 3]}, "expected 2 ids for input_length 600 (one per 512 tokens), not 3"),
        ({"hash_ids": []}, "expected 2 ids for input_length 600 (one per 512 tokens), not 0"),
        ({"hash_ids": [1, 2.5]}, "expected integers or strings, not 2.5"),
        ({"request": "hi"}, "request is 'hi'; expected a chat completion body with a list of messages"),
        ({"request": {"messages": "hi"}}, "expected a chat completion body with a list of messages"),
    ],
)
def test_a_wrong_value_is_named_with_file_line_and_expectation(change: dict[str, Any], said: str) -> None:
    with pytest.raises(TraceError) as raised:
        read({**GOOD, **change})
    assert str(raised.value).startswith("t.jsonl, line 4: ")
    assert said in str(raised.value)


@pytest.mark.parametrize("field", ["timestamp", "input_length", "output_length", "hash_ids"])
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(TraceError, match=f"{field} is missing; expected"):
        read({name: value for name, value in GOOD.items() if name != field})


@pytest.mark.parametrize("text", ["{", "[1]", "7", "[" * 100_000, '"' + "x" * 500])
def test_a_line_that_is_no_object_is_shown_in_short(text: str) -> None:
    with pytest.raises(TraceError, match=r"^t.jsonl, line 4: .*expected a") as raised:
        read_row(text, file="t.jsonl", line_number=4, index=0)
    assert len(str(raised.value)) < 250


@pytest.mark.parametrize(
    ("told", "user"),
    [
        ({"user_id": "u1", "user": "u2"}, "u1"),
        ({"token_hash": 77}, "77"),
        ({"user_id": None, "token_hash": "t"}, "t"),
        ({"user": {"name": "x"}}, None),
        ({"user_id": ""}, None),
        ({}, None),
    ],
)
def test_who_asked_is_taken_where_it_is_told(told: dict[str, Any], user: str | None) -> None:
    assert read({**GOOD, **told}).user == user


def test_turns_are_as_told_or_the_questions_in_the_body() -> None:
    messages = [{"role": role, "content": "x"} for role in ("system", "user", "assistant", "user")]
    body = {"messages": messages}
    assert read({**GOOD, "turn": 7}).turns == 7
    assert read({**GOOD, "request": body}).turns == 2
    assert read({**GOOD, "request": body, "turn": 9}).turns == 9
    assert read({**GOOD, "request": {"messages": []}, "turn": "many"}).turns is None
    assert read(GOOD).turns is None


def test_blocks_of_256_tokens_in_a_row_with_a_body_become_blocks_of_512() -> None:
    def ids(tokens: int, *hashes: str) -> tuple[int, ...]:
        body = {"messages": [{"role": "user", "content": "x"}]}
        row = {"timestamp": 0, "input_length": tokens, "output_length": 1, "request": body}
        return read({**row, "hash_ids": list(hashes)}).hash_ids

    short, longer = ids(1100, "a", "b", "c", "d", "e"), ids(1600, "a", "b", "c", "d", "e", "f", "g")
    assert (len(short), len(longer)) == (3, 4)
    assert short[:2] == longer[:2]
    assert short[2] != longer[2]  # its last block was not full
    other = ids(1100, "z", "b", "c", "d", "e")
    assert set(other).isdisjoint(short)  # an id stands for all before it, even if theirs did not
    assert ids(1100, "a", "b", "c", "d") == short[:2]  # full ones alone
    assert ids(1100, "7", "8", "9") == (7, 8, 9)  # blocks of 512
    assert ids(1100, "a") == ()  # of neither size: its text is its own


@pytest.mark.parametrize(
    "text",
    [
        '{"hash_ids": [' + "0," * MAX_VALUES + "0]}",
        '{"hash_ids": ' + "[" * MAX_VALUES * 2,
        '{"x": [' + "{}," * MAX_VALUES + "{}]}",
    ],
    ids=["ids", "nesting", "objects"],
)
def test_a_line_of_millions_of_values_is_refused_unread(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(_: str) -> None:
        raise AssertionError("the line was parsed")

    monkeypatch.setattr(json, "loads", parse)
    with pytest.raises(TraceError, match=r"t\.jsonl, line 4: some [\d,]+ values; expected 1,000,000 at most"):
        read_row(text, file="t.jsonl", line_number=4, index=0)


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"timestamp": ' + "9" * 100_000 + "}", '{"timestamp": 1e999}', '{"timestamp": -Infinity}', "\x00"],
)
def test_a_line_that_no_writer_of_traces_makes_is_refused_by_its_place(text: str) -> None:
    with pytest.raises(TraceError, match=r"t\.jsonl, line 4: .{1,300}$"):
        read_row(text, file="t.jsonl", line_number=4, index=0)


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


# Sessions, think times, and the size of a block, by the rows.


def written(path: Path, *rows: dict[str, Any]) -> Path:
    given = {"timestamp": 0, "input_length": 40, "output_length": 1, "hash_ids": [1, 2, 3]}
    path.write_text("".join(json.dumps(given | row) + "\n" for row in rows))
    return path


def test_a_file_names_the_size_of_its_blocks_once(tmp_path: Path) -> None:
    path = written(tmp_path / "t.jsonl", {"block_tokens": 16}, {})
    assert [one.block_tokens for one in load_trace(path)] == [16, 16]
    assert own_block_tokens(path) == 16


@pytest.mark.parametrize(
    ("rows", "option", "said"),
    [
        ([{"block_tokens": 16}, {"block_tokens": 32}], None, "line 2: block_tokens is 32; expected 16, as in"),
        ([{"block_tokens": 16}], 64, "line 1: block_tokens is 16; expected 64, as in the lines before or by --block"),
        ([{"block_tokens": 0}], None, "line 1: block_tokens is 0; expected a whole number"),
        (
            [{"block_tokens": 65_537}],
            None,
            "line 1: block_tokens is 65537; expected a whole number of tokens from 1 to",
        ),
        ([{"block_tokens": "16"}], None, "line 1: block_tokens is '16'"),
    ],
)
def test_another_size_of_block_than_the_file_s_is_an_error(
    rows: list[dict[str, Any]], option: int | None, said: str, tmp_path: Path
) -> None:
    with pytest.raises(TraceError, match=said):
        load_trace(written(tmp_path / "t.jsonl", *rows), block_tokens=option)


def test_the_text_of_small_blocks_is_shared_as_their_ids_are() -> None:
    one, two = (
        request_text(TraceRequest(index, 0.0, 40, 1, ids, block_tokens=16))
        for index, ids in enumerate([(1, 2, 3), (1, 9, 3)])
    )
    assert len(one) == len(two) == 160
    assert one[:64] == two[:64]
    assert one[64:128] != two[64:128]


def test_session_think_time_and_ends_of_messages_are_taken_where_they_are_told(tmp_path: Path) -> None:
    told = {"session_id": "s", "think_ms": 1500, "boundaries": [3, 40]}
    odd = {"conversation_id": 7, "think_ms": -1, "boundaries": [4, 3]}
    first, second = load_trace(written(tmp_path / "t.jsonl", told | {"block_tokens": 16}, odd))
    assert (first.session, first.think_s, first.boundaries) == ("s", 1.5, (3, 40))
    assert (second.session, second.think_s, second.boundaries) == ("7", None, ())


def test_users_are_sessions_where_a_row_names_none_and_only_when_asked(tmp_path: Path) -> None:
    path = written(tmp_path / "t.jsonl", {"user_id": "u", "block_tokens": 16}, {"user_id": "u", "session_id": "s"})
    assert [one.session for one in load_trace(path)] == [None, "s"]
    assert [one.session for one in load_trace(path, TraceFilters(user_sessions=True))] == ["u", "s"]


def test_a_turn_follows_the_one_before_it_in_its_session_by_its_think_time_or_the_gap() -> None:
    requests = [
        TraceRequest(4, 0.0, 9, 1, session="a"),
        TraceRequest(5, 1.0, 9, 1, session="b"),
        TraceRequest(6, 3.0, 9, 1, session="a"),
        TraceRequest(7, 9.0, 9, 1),
        TraceRequest(8, 11.0, 9, 1, session="a", think_s=2.5),
    ]
    assert next_turns(requests) == {4: (requests[2], 3.0), 6: (requests[4], 2.5)}
