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
from gorgo.lab.traces import TraceFilters, load_trace, parse_window
from gorgo.lab.traces import TraceRequest as TraceRequest_traces
from gorgo.lab.traces import load as loading
from gorgo.lab.traces.rows import TraceRequest
from gorgo.lab.traces.text import (
    BLOCK_BYTES,
    beginning,
    block_text,
    is_keyed,
    largest_share,
    prompt_text,
    request_text,
    warning,
)
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
