from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.core.stream import FirstTokenDetector, StreamState
from gorgo.core.stream.sse import MAX_EVENT_BYTES

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
    (RESPONSES, {"type": "response.content_part.done", "part": {"text": "a"}}),
    (RESPONSES, {"type": "response.created", "text": "a"}),
    (COMPLETION, {"choices": [{"delta": {"content": "a"}}]}),
    (CHAT, {"choices": {"delta": {"content": "a"}}}),
    (CHAT, delta(name="a", role="user")),
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
def test_text_reasoning_tool_calls_and_audio_are_content(route: str, data: Any) -> None:
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
