from __future__ import annotations

import json
import sys
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.core.stream import Usage, UsageEventFilter, UsageReader, read_usage
from gorgo.core.stream.sse import MAX_EVENT_BYTES
from gorgo.core.stream.usage import HEAD_BYTES, MAX_CANDIDATES, TAIL_BYTES


def event(data: Any, eol: str = "\n") -> bytes:
    return f"data: {data if isinstance(data, str) else json.dumps(data)}{eol}{eol}".encode()


OPENAI = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 5}}
CHUNK = event({"choices": [{"delta": {"content": "x"}}], "usage": None})
USAGE_ONLY = event({"id": "1", "choices": [], "usage": OPENAI})
DONE = event("[DONE]")


@pytest.mark.parametrize(
    ("body", "usage"),
    [
        ({"usage": OPENAI}, Usage(9, 5, 2)),
        ({"usage": {"prompt_tokens": 9, "prompt_tokens_details": None}}, Usage(9, None, None)),
        (
            {"usage": {"input_tokens": 9, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 5}}},
            Usage(9, 5, 2),
        ),
        (
            {"usage": {"input_tokens": 4, "cache_read_input_tokens": 5, "cache_creation_input_tokens": 1}},
            Usage(10, 5, None),
        ),
        ({"meta_info": {"prompt_tokens": 9, "completion_tokens": 2, "cached_tokens": 5}}, Usage(9, 5, 2)),
        ([{"meta_info": {"prompt_tokens": 9}}, {"meta_info": {"prompt_tokens": 1}}], Usage(10, None, None)),
        ({"usage": {"prompt_tokens": True, "completion_tokens": -1}}, None),
        ({"usage": {"prompt_tokens": "9"}}, None),
        ({"usage": {"prompt_tokens": 9.5, "completion_tokens": 2.0}}, None),
        ({"usage": {"prompt_tokens": 9.5, "input_tokens": 9}}, Usage(9, None, None)),
        ({"usage": {"completion_tokens": 2}}, Usage(None, None, 2)),
        ({"usage": {"prompt_tokens": 9, "cached_tokens": 5}}, Usage(9, 5, None)),
        (
            {"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 0}, "cached_tokens": 5}},
            Usage(9, 0, None),
        ),
        ({"usage": {"cache_read_input_tokens": 5, "output_tokens": 1}}, Usage(None, 5, 1)),
        ({"usage": {"input_tokens": 4, "cache_read_input_tokens": 5}}, Usage(9, 5, None)),
        ({"usage": {"input_tokens": 4, "cache_creation_input_tokens": 5}}, Usage(4, None, None)),
        ({"usage": {"input_tokens": 4, "cache_read_input_tokens": None}}, Usage(4, None, None)),
        ({"usage": OPENAI, "meta_info": {"finish_reason": None}}, Usage(9, 5, 2)),
        (
            [{"meta_info": {"prompt_tokens": 9, "cached_tokens": 4}}, {"meta_info": {"cached_tokens": 3}}],
            Usage(9, 4, None),
        ),
        (
            [
                {"meta_info": {"prompt_tokens": 9, "cached_tokens": 4}},
                {"meta_info": {"prompt_tokens": 1, "cached_tokens": 3}},
            ],
            Usage(10, 7, None),
        ),
        ({"usage": {"prompt_tokens": 10**400, "completion_tokens": 2}}, Usage(None, None, 2)),
        ({"usage": {"prompt_tokens": 9, "completion_tokens": 10**300}}, Usage(9, None, None)),
        ({"usage": None}, None),
        ([], None),
        ({}, None),
    ],
)
def test_usage_of_a_whole_body_in_every_dialect(body: Any, usage: Usage | None) -> None:
    assert read_usage(json.dumps(body).encode()) == usage
    assert read_usage(json.dumps(body, indent=1).encode()) == usage


def test_generated_text_cannot_be_mistaken_for_usage() -> None:
    body = {"usage": OPENAI, "choices": [{"message": {"content": '{"usage": {"prompt_tokens": 1000}}'}}]}
    assert read_usage(json.dumps(body).encode()) == Usage(9, 5, 2)


def test_batch_of_any_number_of_answers_is_summed() -> None:
    answers = [{"text": "a", "meta_info": {"prompt_tokens": 2, "completion_tokens": 1}} for _ in range(500)]
    assert read_usage(json.dumps(answers).encode()) == Usage(1000, None, 500)
    assert read_usage(json.dumps([*answers, None, {}, {"meta_info": 7}]).encode()) == Usage(1000, None, 500)


def test_reply_of_nothing_but_usage_objects_is_not_read_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    monkeypatch.setattr("gorgo.core.stream.usage._object_at", lambda _, start: looks.append(start))
    tail = UsageReader()
    tail.feed(b'data: {"choices": []}' + b" " * 4096 + b'{"usage":' * 1000 + b"{")
    assert tail.usage() is None
    assert read_usage(b'{"usage":' * 1000 + b"{") is None
    assert read_usage(b"[" + b'{"usage":' * 1000 + b"{") is None
    assert len(looks) == 2 * MAX_CANDIDATES


def test_schema_that_names_usage_is_passed_over() -> None:
    body = {"usage": OPENAI, "tools": [{"parameters": {"properties": {"usage": {"type": "string"}}}}]}
    assert read_usage(json.dumps(body).encode()) == Usage(9, 5, 2)


@pytest.mark.parametrize(
    "body", [b"", b"nothing", b'{"usage": {', b'{"usage": {"prompt_tokens": 1', b'"usage":' + b"{" * 9999]
)
def test_broken_body_has_no_usage(body: bytes) -> None:
    assert read_usage(body) is None


def test_last_usage_of_a_stream_counts() -> None:
    tail = UsageReader()
    for chunk in (event({"usage": {"prompt_tokens": 9, "completion_tokens": 1}}), CHUNK, USAGE_ONLY, DONE):
        tail.feed(chunk)
    assert tail.usage() == Usage(9, 5, 2)


def test_long_final_event_is_read_from_its_end() -> None:
    usage = {"input_tokens": 9, "output_tokens": 2}
    tail = UsageReader()
    tail.feed(event({"type": "response.completed", "response": {"output": "x" * 10 * TAIL_BYTES, "usage": usage}}))
    assert tail.usage() == Usage(9, None, 2)


def test_prompt_s_length_at_the_beginning_of_a_short_stream_is_found_too() -> None:
    tail = UsageReader()
    tail.feed(event({"type": "message_start", "message": {"usage": {"input_tokens": 9, "output_tokens": 1}}}))
    tail.feed(event({"type": "message_delta", "usage": {"output_tokens": 40}}))
    assert tail.usage() == Usage(9, None, 40)


def test_prompt_length_told_at_the_start_is_kept() -> None:
    tail = UsageReader()
    tail.feed(event({"type": "message_start", "message": {"usage": {"input_tokens": 9, "output_tokens": 1}}}))
    for _ in range(2000):
        tail.feed(event({"type": "content_block_delta", "delta": {"text": "word " * 10}}))
    tail.feed(event({"type": "message_delta", "usage": {"output_tokens": 2000}}))
    assert tail.usage() == Usage(9, None, 2000)


@pytest.mark.parametrize(("before", "found"), [(HEAD_BYTES - 100, True), (HEAD_BYTES, False)])
def test_the_start_of_a_stream_is_kept_up_to_its_bound(before: int, found: bool) -> None:
    start = b" " * before + b'"usage": {"input_tokens": 9}'
    tail = UsageReader()
    for chunk in (start[:10], start[10:], b"x" * 3 * TAIL_BYTES, event({"usage": {"output_tokens": 2}})):
        tail.feed(chunk)
    assert tail.usage() == Usage(9 if found else None, None, 2)


def test_usage_at_the_end_of_a_stream_goes_before_usage_at_its_start() -> None:
    tail = UsageReader()
    tail.feed(event({"usage": {"input_tokens": 9, "output_tokens": 1}}) + b"x" * 3 * TAIL_BYTES)
    tail.feed(event({"usage": {"input_tokens": 12, "output_tokens": 7, "cached_tokens": 3}}))
    assert tail.usage() == Usage(12, 3, 7)


@pytest.mark.parametrize(("behind", "found"), [(TAIL_BYTES - 100, True), (TAIL_BYTES, False)])
def test_the_end_of_a_stream_is_read_up_to_its_bound(behind: int, found: bool) -> None:
    tail = UsageReader()
    tail.feed(b" " * HEAD_BYTES + b'"usage": {"prompt_tokens": 9}')
    tail.feed(b" " * behind)
    assert tail.usage() == (Usage(9, None, None) if found else None)


def test_stream_without_usage_has_none() -> None:
    tail = UsageReader()
    tail.feed(CHUNK + DONE)
    assert tail.usage() is None


@pytest.mark.parametrize("size", [1, 160, 1_000, 100_000])
def test_tail_takes_no_more_memory_however_long_the_stream_is(size: int) -> None:
    tail = UsageReader()
    most = 0
    for _ in range(max(10, 100_000 // size)):
        tail.feed(b"x" * size)
        most = max(most, sys.getsizeof(tail._tail))
    assert most <= 1.3 * TAIL_BYTES, "beyond it the copy's slack and what a bytearray over-allocates"


@given(data=st.binary(max_size=60_000), sizes=st.lists(st.integers(1, 20_000), min_size=1, max_size=8))
def test_tail_split_anywhere_reads_the_same(data: bytes, sizes: list[int]) -> None:
    stream = data + USAGE_ONLY + data[: TAIL_BYTES // 2]
    whole, split = UsageReader(), UsageReader()
    whole.feed(stream)
    at = 0
    while at < len(stream):
        split.feed(stream[at : at + sizes[at % len(sizes)]])
        at += sizes[at % len(sizes)]
    assert split.usage() == whole.usage() == Usage(9, 5, 2)


@pytest.mark.parametrize("eol", ["\n", "\r\n"])
def test_usage_only_event_is_taken_out_and_nothing_else(eol: str) -> None:
    kept = [
        event({"choices": [{"delta": {"content": 'choices": [], "usage": {'}}], "usage": None}, eol),
        b": ping" + eol.encode() * 2,
        event({"choices": [], "prompt_filter_results": []}, eol),
        event({"choices": [{"delta": {}}], "usage": OPENAI}, eol),
    ]
    usage_filter = UsageEventFilter()
    stream = b"".join([*kept, event({"choices": [], "usage": OPENAI}, eol), event("[DONE]", eol)])
    assert usage_filter.feed(stream) + usage_filter.flush() == b"".join([*kept, event("[DONE]", eol)])
    assert usage_filter.usage == Usage(9, 5, 2)


def test_usage_without_a_count_keeps_the_one_before() -> None:
    usage_filter = UsageEventFilter()
    empty = event({"choices": [], "usage": {"prompt_tokens": None}})
    assert usage_filter.feed(USAGE_ONLY + empty + event({"choices": [], "usage": {}}) + DONE) == DONE
    assert usage_filter.usage == Usage(9, 5, 2)


@pytest.mark.parametrize("eol", [b"\n", b"\r\n", b"\r"])
def test_usage_over_several_lines_after_a_mark_is_taken_out(eol: bytes) -> None:
    usage_filter = UsageEventFilter()
    lines = [b'\xef\xbb\xbfdata: {"choices": [],', b": comment", b'data:"usage": {"prompt_tokens": 9}}', b"", b""]
    assert usage_filter.feed(eol.join(lines) + DONE) + usage_filter.flush() == DONE
    assert usage_filter.usage == Usage(9, None, None)


@pytest.mark.parametrize(
    "data",
    [
        '{"usage": {',
        '{"choices": [], "usage": 7, "meta_info": {}}',
        '{"choices": null, "usage": {"prompt_tokens": 9}}',
        '{"usage": {"prompt_tokens": 9}}',
        '{"choices": [], "meta_info": {}}',
        '[{"usage": {}}]',
        '{"choices": [], "usage": {}, "x": ' + "[" * 30_000,
    ],
)
def test_event_that_only_looks_like_usage_passes(data: str) -> None:
    assert UsageEventFilter().feed(event(data)) == event(data)


def test_whole_events_pass_at_once() -> None:
    usage_filter = UsageEventFilter()
    assert usage_filter.feed(CHUNK) == CHUNK
    assert usage_filter.feed(CHUNK[:-1]) == b""
    assert usage_filter.feed(CHUNK[-1:]) == CHUNK


def test_very_long_event_passes_before_its_end_and_the_next_is_judged_again() -> None:
    usage_filter = UsageEventFilter()
    long = event({"choices": [], "x": "y" * (2 * MAX_EVENT_BYTES), "usage": OPENAI})
    early = usage_filter.feed(long[:-100])
    assert len(early) > MAX_EVENT_BYTES
    rest = usage_filter.feed(long[-100:]) + usage_filter.feed(USAGE_ONLY) + usage_filter.feed(DONE)
    assert early + rest + usage_filter.flush() == long + DONE


def test_stream_that_breaks_off_loses_nothing() -> None:
    usage_filter = UsageEventFilter()
    assert usage_filter.feed(CHUNK + b"data: {") + usage_filter.flush() == CHUNK + b"data: {"


EVENTS = st.sampled_from(
    [CHUNK, CHUNK.replace(b"\n", b"\r\n"), DONE, b": c\n\n", b"\r\r", b"\r\n", b"data: x\n", b"\xef\xbb\xbf"]
)


@given(before=st.lists(EVENTS, max_size=5), after=st.lists(EVENTS, max_size=3), cuts=st.lists(st.integers(0, 500)))
def test_filter_split_anywhere_gives_the_same_bytes(before: list[bytes], after: list[bytes], cuts: list[int]) -> None:
    stream = b"".join([*before, b"\n\n", USAGE_ONLY, *after])
    edges = [0, *sorted(cuts), len(stream)]
    chunks = [stream[a:b] for a, b in pairwise(edges)]
    single = [stream[k : k + 1] for k in range(len(stream))]
    expected = b"".join([*before, b"\n\n", *after])
    for pieces in ([stream], chunks, single):
        usage_filter = UsageEventFilter()
        assert b"".join([*map(usage_filter.feed, pieces), usage_filter.flush()]) == expected
        assert usage_filter.usage == Usage(9, 5, 2)
