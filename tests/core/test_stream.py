""""""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.core.stream import (
    HEAD_BYTES,
    MAX_CANDIDATES,
    MAX_EVENT_BYTES,
    MAX_LINES,
    TAIL_BYTES,
    FirstTokenDetector,
    SseEvent,
    SseReader,
    StreamState,
    Usage,
    UsageEventFilter,
    UsageReader,
    read_usage,
)

CHAT, COMPLETION, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"


def event(data: Any, name: str = "") -> bytes:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


def scan(route: str, *events: bytes) -> StreamState:
    return FirstTokenDetector(route).feed(b"".join(events))


CONTENT: list[tuple[str, Any]] = [
    (CHAT, delta(content="a")),
    (CHAT, delta(role="assistant", content="a")),
    (CHAT, delta(content="", reasoning_content="hm")),
    (CHAT, delta(reasoning="hm")),
    (CHAT, delta(refusal="no")),
    (CHAT, delta(tool_calls=[{"index": 0, "function": {"name": "f", "arguments": ""}}])),
    (CHAT, delta(function_call={"name": "f"})),
    (CHAT, delta(audio={"id": "x", "data": "AAAA"})),
    (CHAT, {"choices": [{"delta": {}}, {"delta": {"content": "b"}}]}),
    (COMPLETION, {"choices": [{"text": " "}]}),
    (GENERATE, {"text": "a", "meta_info": {}}),
    (GENERATE, {"output_ids": [5], "meta_info": {}}),
    (RESPONSES, {"type": "response.output_text.delta", "delta": "a"}),
    (RESPONSES, {"type": "response.reasoning_summary_text.delta", "delta": "a"}),
    (RESPONSES, {"type": "response.function_call_arguments.delta", "delta": "{"}),
    (RESPONSES, {"type": "response.output_item.added", "item": {"type": "function_call", "name": "f"}}),
    (RESPONSES, {"type": "response.output_text.done", "text": "all"}),
    (MESSAGES, {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "a"}}),
    (MESSAGES, {"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": "a"}}),
    (MESSAGES, {"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": "{"}}),
    (MESSAGES, {"type": "content_block_start", "content_block": {"type": "tool_use", "name": "f"}}),
    (MESSAGES, {"type": "content_block_start", "content_block": {"type": "text", "text": "a"}}),
    (MESSAGES, {"type": "content_block_start", "content_block": {"type": "thinking", "thinking": "a"}}),
    (MESSAGES, {"type": "content_block_start", "content_block": {"type": "server_tool_use", "name": "f"}}),
    (RESPONSES, {"type": "response.refusal.done", "refusal": "no"}),
    (RESPONSES, {"type": "response.function_call_arguments.done", "arguments": "{}"}),
    ("/v1/embeddings", delta(content="a")),
    (CHAT, delta(name="a", role="user")),
    (CHAT, delta(content="", reasoning_details=[{"type": "reasoning.text", "text": "hm"}])),
    (CHAT, delta(thinking_blocks=[{"type": "thinking", "thinking": "hm"}])),
    (CHAT, delta(images=[{"image_url": {"url": "data:image/png;base64,AAAA"}}])),
    (CHAT, delta(annotations=[{"type": "url_citation"}])),
    (CHAT, delta(role="assistant", progress="searching")),
    (CHAT, {"choices": [{"index": 0, "delta": {"content": ""}, "token_ids": [5]}]}),
    (COMPLETION, {"choices": [{"index": 0, "text": "", "token_ids": [5]}]}),
    (COMPLETION, {"choices": [{"index": 0, "text": "", "reasoning": "hm"}]}),
    (COMPLETION, {"choices": [{"delta": {"content": "a"}}]}),
    (GENERATE, {"text": "", "token_ids": [5], "meta_info": {}}),
    (GENERATE, {"token": {"id": 5, "text": "a"}, "generated_text": None}),
    (RESPONSES, {"type": "response.content_part.added", "part": {"type": "output_text", "text": "a"}}),
    (RESPONSES, {"type": "response.content_part.done", "part": {"text": "a"}}),
    (RESPONSES, {"type": "response.output_item.added", "item": {"type": "reasoning", "encrypted_content": "x"}}),
    (RESPONSES, {"type": "response.output_text.annotation.added", "annotation": {"type": "url_citation"}}),
    (RESPONSES, {"type": "response.image_generation_call.partial_image", "partial_image_b64": "AAAA"}),
    (MESSAGES, {"type": "content_block_start", "content_block": {"type": "redacted_thinking", "data": "xyz"}}),
    (MESSAGES, {"type": "content_block_start", "content_block": {"type": "web_search_tool_result", "content": [{}]}}),
    (MESSAGES, {"type": "content_block_delta", "delta": {"type": "signature_delta", "signature": "x"}}),
    (MESSAGES, {"type": "content_block_delta", "delta": {"type": "citations_delta", "citation": {"url": "x"}}}),
]

NOTHING_YET: list[tuple[str, Any]] = [
    (CHAT, delta(role="assistant", content="")),
    (CHAT, delta(role="assistant", content=None, tool_calls=[], audio=None)),
    (CHAT, {"choices": [], "usage": {"prompt_tokens": 1}}),
    (CHAT, {"choices": None}),
    (CHAT, {"choices": [None, 3, {"delta": "x"}]}),
    (CHAT, "not json"),
    (CHAT, "[1, 2]"),
    (CHAT, "[" * 30_000),
    (COMPLETION, {"choices": [{"text": ""}]}),
    (GENERATE, {"text": "", "output_ids": [], "meta_info": {"finish_reason": None}}),
    (RESPONSES, {"type": "response.created", "response": {"status": "in_progress", "error": None}}),
    (RESPONSES, {"type": "response.output_item.added", "item": {"type": "message", "content": []}}),
    (RESPONSES, {"type": "response.output_text.delta", "delta": ""}),
    (RESPONSES, {"type": 5}),
    (MESSAGES, {"type": "message_start", "message": {"content": [], "usage": {"input_tokens": 3}}}),
    (MESSAGES, {"type": "content_block_start", "content_block": {"type": "text", "text": ""}}),
    (MESSAGES, {"type": "ping"}),
    (MESSAGES, {"type": "content_block_delta", "delta": {"type": "text_delta", "text": ""}}),
    (MESSAGES, {"type": "content_block_delta", "delta": "a"}),
    (MESSAGES, {"type": "other", "delta": {"text": "a"}}),
    (RESPONSES, {"type": "response.output_text.done", "text": ""}),
    (RESPONSES, {"type": "response.created", "text": "a"}),
    (
        RESPONSES,
        {"type": "response.content_part.added", "part": {"type": "output_text", "text": "", "annotations": []}},
    ),
    (RESPONSES, {"type": "response.output_item.added", "item": {"type": "reasoning", "id": "r", "summary": []}}),
    (RESPONSES, {"type": "response.reasoning_summary_part.added", "summary_index": 1, "part": {"text": ""}}),
    (RESPONSES, {"type": "keepalive", "sequence_number": 3}),
    (COMPLETION, {"choices": [{"index": 1, "text": "", "prompt_token_ids": [1, 2], "logprobs": {"tokens": []}}]}),
    (CHAT, {"choices": {"delta": {"content": "a"}}}),
    (CHAT, {"choices": [{"index": 1, "delta": {"role": "assistant"}, "content_filter_results": {"hate": {}}}]}),
    (GENERATE, {"id": "r", "text": "", "index": 1, "meta_info": {"id": "r"}}),
    (MESSAGES, {"type": "content_block_start", "content_block": {"type": "thinking", "thinking": "", "signature": ""}}),
]

ENDS: list[tuple[str, Any]] = [
    (CHAT, "[DONE]"),
    (CHAT, {"choices": [{"delta": {}, "finish_reason": "stop"}]}),
    (COMPLETION, {"choices": [{"text": "", "finish_reason": "stop"}]}),
    (GENERATE, {"text": "", "meta_info": {"finish_reason": {"type": "stop"}}}),
    (RESPONSES, {"type": "response.completed", "response": {}}),
    (MESSAGES, {"type": "message_delta", "delta": {"stop_reason": "end_turn"}}),
    (MESSAGES, {"type": "message_stop"}),
    (RESPONSES, {"type": "response.incomplete", "response": {}}),
    (RESPONSES, " [DONE] "),
    (RESPONSES, {"type": "response.cancelled", "response": {}}),
    (COMPLETION, {"choices": [{"text": "", "finish_reason": "stop", "stop_reason": 128001, "matched_stop": 2}]}),
]

ERRORS: list[tuple[str, str, Any, int]] = [
    (CHAT, "", {"error": {"message": "out of memory", "code": 503}}, 503),
    (CHAT, "", {"error": {"message": "?", "code": "429"}}, 429),
    (CHAT, "", {"error": {"message": "?", "code": "rate_limit_exceeded"}}, 429),
    (CHAT, "", {"error": {"message": "?", "type": "BadRequestError", "code": None}}, 400),
    (CHAT, "", {"error": {"message": "?", "code": 12}}, 500),
    (CHAT, "", {"error": {"code": ["odd"], "type": {"odd": 1}}}, 500),
    (CHAT, "", {"error": "broken"}, 500),
    (CHAT, "", {"object": "error", "message": "?", "code": 400}, 400),
    (CHAT, "error", "broken", 500),
    (GENERATE, "", {"text": "", "meta_info": {"finish_reason": {"type": "abort", "status_code": 503}}}, 503),
    (GENERATE, "", {"text": "", "meta_info": {"finish_reason": {"type": "abort", "message": "x"}}}, 500),
    (RESPONSES, "", {"type": "response.failed", "response": {"error": {"code": "server_error"}}}, 500),
    (RESPONSES, "", {"type": "error", "code": "rate_limit_exceeded"}, 429),
    (MESSAGES, "error", {"type": "error", "error": {"type": "overloaded_error"}}, 503),
    (MESSAGES, "", {"type": "error", "error": {"type": "not_found_error"}}, 404),
    (CHAT, "error", {"message": "?", "code": 413}, 413),
    (CHAT, "", {"error": {"code": 400}}, 400),
    (CHAT, "", {"error": {"code": 399, "status_code": 422}}, 422),
    (CHAT, "", {"error": {"code": 599}}, 599),
    (CHAT, "", {"error": {"code": 600}}, 500),
    (CHAT, "", {"error": {"code": "0429"}}, 500),
    (CHAT, "", {"error": {"code": "²²²"}}, 500),
    (CHAT, "", {"error": {"status": 418}}, 418),
    (CHAT, "", {"error": {"type": "rate_limit_error", "code": "server_error"}}, 429),
    (CHAT, "", {"error": {"message": "?"}, "choices": [{"delta": {"content": "a"}}]}, 500),
    (RESPONSES, "", {"type": "response.failed", "response": {}}, 500),
    (RESPONSES, "", {"type": "response.in_progress", "response": {"error": {"code": "invalid_prompt"}}}, 400),
]


@pytest.mark.parametrize(("route", "data"), CONTENT)
def test_what_a_model_generates_is_content_under_any_name(route: str, data: Any) -> None:
    assert scan(route, event(data)) is StreamState.CONTENT


@pytest.mark.parametrize(("route", "data"), NOTHING_YET)
def test_roles_empty_deltas_and_noise_are_not_content(route: str, data: Any) -> None:
    scanner = FirstTokenDetector(route)
    assert scanner.feed(b": ping\r\n\r\n" + event(data)) is StreamState.WAITING
    assert not scanner.ended


@pytest.mark.parametrize(("route", "data"), ENDS)
def test_end_without_content_is_told(route: str, data: Any) -> None:
    scanner = FirstTokenDetector(route)
    assert scanner.feed(event(data)) is StreamState.WAITING
    assert scanner.ended


@pytest.mark.parametrize(("route", "name", "data", "status"), ERRORS)
def test_error_before_content_is_told_with_its_status(route: str, name: str, data: Any, status: int) -> None:
    scanner = FirstTokenDetector(route)
    assert scanner.feed(event(data, name)) is StreamState.ERROR
    assert scanner.error_status == status
    assert scanner.feed(event(delta(content="late"))) is StreamState.ERROR


@pytest.mark.parametrize(
    ("word", "status"),
    [
        *((word, 400) for word in ("invalid_request_error", "BadRequestError", "invalid_prompt")),
        ("authentication_error", 401),
        ("permission_error", 403),
        *((word, 404) for word in ("not_found_error", "NotFoundError")),
        ("request_too_large", 413),
        *((word, 429) for word in ("rate_limit_error", "rate_limit_exceeded")),
        *((word, 500) for word in ("api_error", "server_error", "a word that nobody knows")),
        ("overloaded_error", 503),
        ("timeout_error", 504),
    ],
)
def test_a_word_of_any_dialect_stands_for_its_status(word: str, status: int) -> None:
    for member in ("type", "code"):
        scanner = FirstTokenDetector(CHAT)
        assert scanner.feed(event({"error": {member: word}})) is StreamState.ERROR
        assert scanner.error_status == status


def test_an_end_is_not_taken_back_by_later_events() -> None:
    scanner = FirstTokenDetector(CHAT)
    scanner.feed(event("[DONE]") + event({"choices": [], "usage": {}}))
    assert scanner.ended


def test_nothing_after_the_first_content_is_read() -> None:
    scanner = FirstTokenDetector(CHAT)
    assert scanner.feed(event(delta(content="a")) + event({"error": {"code": 500}})) is StreamState.CONTENT
    assert scanner.feed(event({"error": {"code": 500}})) is StreamState.CONTENT
    assert scanner.error_status is None


def test_event_too_long_to_hold_back_counts_as_content() -> None:
    assert FirstTokenDetector(CHAT).feed(b"data: " + b"x" * (2 * MAX_EVENT_BYTES)) is StreamState.CONTENT


ALL = [(route, event(data)) for route, data in CONTENT + NOTHING_YET + ENDS if data != "[" * 30_000]
ALL += [(route, event(data, name)) for route, name, data, _ in ERRORS]


@given(
    route=st.sampled_from([CHAT, COMPLETION, GENERATE, RESPONSES, MESSAGES]),
    events=st.lists(st.sampled_from([data for _, data in ALL] + [b": ping\n\n"]), max_size=6),
    cut=st.integers(0, 2000),
)
def test_split_anywhere_gives_the_same_answer(route: str, events: list[bytes], cut: int) -> None:
    stream = b"".join(events)
    whole, halves, bytewise = (FirstTokenDetector(route) for _ in range(3))
    expected = whole.feed(stream)
    halves.feed(stream[:cut])
    assert halves.feed(stream[cut:]) is expected
    states = [bytewise.feed(stream[k : k + 1]) for k in range(len(stream))] or [StreamState.WAITING]
    assert states[-1] is expected
    seen = {(scanner.error_status, scanner.ended) for scanner in (whole, halves, bytewise)}
    assert len(seen) == 1


def test_state_changes_with_the_byte_that_completes_an_event() -> None:
    for route, stream in ALL:
        scanner = FirstTokenDetector(route)
        assert scanner.feed(stream[:-1]) is StreamState.WAITING, stream
        assert scanner.feed(stream[-1:]) is scan(route, stream), stream


@given(stream=st.binary(max_size=300), route=st.sampled_from([CHAT, COMPLETION, GENERATE, RESPONSES, MESSAGES]))
def test_any_bytes_are_survived(stream: bytes, route: str) -> None:
    FirstTokenDetector(route).feed(b"data: " + stream + b"\n\n")


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


def data_of(data: Any, eol: str = "\n") -> bytes:
    return f"data: {data if isinstance(data, str) else json.dumps(data)}{eol}{eol}".encode()


OPENAI = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 5}}
CHUNK = data_of({"choices": [{"delta": {"content": "x"}}], "usage": None})
USAGE_ONLY = data_of({"id": "1", "choices": [], "usage": OPENAI})
DONE = data_of("[DONE]")


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
    monkeypatch.setattr("gorgo.core.stream._object_at", lambda _, start: looks.append(start))
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
    for chunk in (data_of({"usage": {"prompt_tokens": 9, "completion_tokens": 1}}), CHUNK, USAGE_ONLY, DONE):
        tail.feed(chunk)
    assert tail.usage() == Usage(9, 5, 2)


def test_long_final_event_is_read_from_its_end() -> None:
    usage = {"input_tokens": 9, "output_tokens": 2}
    tail = UsageReader()
    tail.feed(data_of({"type": "response.completed", "response": {"output": "x" * 10 * TAIL_BYTES, "usage": usage}}))
    assert tail.usage() == Usage(9, None, 2)


def test_prompt_s_length_at_the_beginning_of_a_short_stream_is_found_too() -> None:
    tail = UsageReader()
    tail.feed(data_of({"type": "message_start", "message": {"usage": {"input_tokens": 9, "output_tokens": 1}}}))
    tail.feed(data_of({"type": "message_delta", "usage": {"output_tokens": 40}}))
    assert tail.usage() == Usage(9, None, 40)


def test_prompt_length_told_at_the_start_is_kept() -> None:
    tail = UsageReader()
    tail.feed(data_of({"type": "message_start", "message": {"usage": {"input_tokens": 9, "output_tokens": 1}}}))
    for _ in range(2000):
        tail.feed(data_of({"type": "content_block_delta", "delta": {"text": "word " * 10}}))
    tail.feed(data_of({"type": "message_delta", "usage": {"output_tokens": 2000}}))
    assert tail.usage() == Usage(9, None, 2000)


def test_all_of_a_stream_is_retained_as_long_as_there_is_memory_for_it() -> None:
    asked: list[int] = []

    def more(size: int) -> int:
        asked.append(size)
        return size + 32 * 1024 if size < 200_000 else 0

    reader, fed = UsageReader(), b""
    reader.keep(more)
    for number in range(3000):
        chunk = b"event %d\n\n" % number * 7
        reader.feed(chunk)
        fed += chunk
        assert reader.size == len(fed)
        assert reader.tail == fed[-len(reader.tail) :]
        if asked and asked[-1] >= 200_000:
            break
        if number % 100 == 0:
            assert reader.whole == fed
    assert len(asked) == 7, "once for 32 KiB each, and a last time in vain"
    assert reader.whole is None


@pytest.mark.parametrize(("before", "found"), [(HEAD_BYTES - 100, True), (HEAD_BYTES, False)])
def test_the_start_of_a_stream_is_kept_up_to_its_bound(before: int, found: bool) -> None:
    start = b" " * before + b'"usage": {"input_tokens": 9}'
    tail = UsageReader()
    for chunk in (start[:10], start[10:], b"x" * 3 * TAIL_BYTES, data_of({"usage": {"output_tokens": 2}})):
        tail.feed(chunk)
    assert tail.usage() == Usage(9 if found else None, None, 2)


def test_usage_at_the_end_of_a_stream_goes_before_usage_at_its_start() -> None:
    tail = UsageReader()
    tail.feed(data_of({"usage": {"input_tokens": 9, "output_tokens": 1}}) + b"x" * 3 * TAIL_BYTES)
    tail.feed(data_of({"usage": {"input_tokens": 12, "output_tokens": 7, "cached_tokens": 3}}))
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


@pytest.mark.parametrize("size", [1, 160, 100_000])
def test_tail_takes_no_more_memory_however_long_the_stream_is(size: int) -> None:
    tail = UsageReader()
    most = 0
    for _ in range(max(10, 100_000 // size)):
        tail.feed(b"x" * size)
        held = [*tail._pieces, *tail._chunks]
        most = max(most, sum(map(sys.getsizeof, held)) + 8 * len(held))
    assert most <= 1.8 * TAIL_BYTES, "beyond it a piece, the next one's chunks, and the objects of small ones"


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
        data_of({"choices": [{"delta": {"content": 'choices": [], "usage": {'}}], "usage": None}, eol),
        b": ping" + eol.encode() * 2,
        data_of({"choices": [], "prompt_filter_results": []}, eol),
        data_of({"choices": [{"delta": {}}], "usage": OPENAI}, eol),
    ]
    usage_filter = UsageEventFilter()
    stream = b"".join([*kept, data_of({"choices": [], "usage": OPENAI}, eol), data_of("[DONE]", eol)])
    assert usage_filter.feed(stream) + usage_filter.flush() == b"".join([*kept, data_of("[DONE]", eol)])
    assert usage_filter.usage == Usage(9, 5, 2)


def test_usage_without_a_count_keeps_the_one_before() -> None:
    usage_filter = UsageEventFilter()
    empty = data_of({"choices": [], "usage": {"prompt_tokens": None}})
    assert usage_filter.feed(USAGE_ONLY + empty + data_of({"choices": [], "usage": {}}) + DONE) == DONE
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
    assert UsageEventFilter().feed(data_of(data)) == data_of(data)


def test_whole_events_pass_at_once() -> None:
    usage_filter = UsageEventFilter()
    assert usage_filter.feed(CHUNK) == CHUNK
    assert usage_filter.feed(CHUNK[:-1]) == b""
    assert usage_filter.feed(CHUNK[-1:]) == CHUNK


def test_very_long_event_passes_before_its_end_and_the_next_is_judged_again() -> None:
    usage_filter = UsageEventFilter()
    long = data_of({"choices": [], "x": "y" * (2 * MAX_EVENT_BYTES), "usage": OPENAI})
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


def test_bytes_of_a_stream_are_counted_beyond_what_is_retained() -> None:
    tail = UsageReader()
    for _ in range(10):
        tail.feed(b"x" * TAIL_BYTES)
    assert tail.size == 10 * TAIL_BYTES
