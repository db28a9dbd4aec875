"""What has ended: a stream with or without its end, an error in disguise, an answer of one token."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gorgo.core.stream import StreamEnd, Usage, end_of_stream, error_of_body, has_end, is_json, is_short
from tests.proxy.fakes import DONE, ROLE, USAGE, delta, event

CHAT = "/v1/chat/completions"
STOP = event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
ERROR = event({"error": {"message": "out of memory", "code": 500}})
ABORT = event({"choices": [{"delta": {"content": ""}, "finish_reason": "abort", "stop_reason": None}]})
TEXT = event({"type": "content_block_delta", "delta": {"type": "text_delta", "text": "a"}})
SECOND = event({"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "a"}})


def choice(index: int, reason: str | None = None) -> bytes:
    """An event of one of several choices, in the form of chats and of completions."""
    return event({"choices": [{"index": index, "delta": {"content": "a"}, "text": "a", "finish_reason": reason}]})


def part(index: int, reason: str | None = None) -> bytes:
    """The same of SGLang's own route."""
    return event({"index": index, "text": "a", "meta_info": {"finish_reason": reason and {"type": reason}}})


@pytest.mark.parametrize(
    ("route", "stream", "end"),
    [
        (CHAT, ROLE + delta("a") + DONE, StreamEnd.COMPLETE),
        (CHAT, delta("a") + STOP, StreamEnd.COMPLETE),
        (CHAT, delta("a") + STOP + USAGE, StreamEnd.COMPLETE),
        (CHAT, delta("a") + STOP + DONE + b": ping\n\n", StreamEnd.COMPLETE),
        (CHAT, delta("a"), StreamEnd.MISSING),
        (CHAT, delta("a") + b'data: {"choices": [{"del', StreamEnd.MISSING),
        (CHAT, delta("[DONE]"), StreamEnd.MISSING),
        (CHAT, delta("a") + ERROR, StreamEnd.ERROR),
        (CHAT, delta("a") + ERROR + DONE, StreamEnd.ERROR),
        (CHAT, delta("a") + event({"error": {"message": "too long", "code": 400}}) + DONE, StreamEnd.COMPLETE),
        (CHAT, delta('say "error"') + STOP + DONE, StreamEnd.COMPLETE),
        (CHAT, delta("a") + ABORT, StreamEnd.ERROR),
        (CHAT, delta("a") + ABORT + DONE, StreamEnd.ERROR),
        (CHAT, delta("a") + ABORT + USAGE + DONE, StreamEnd.ERROR),
        (CHAT, choice(1) + choice(0, "abort") + choice(1, "stop") + DONE, StreamEnd.ERROR),
        (CHAT, delta('say "abort"') + STOP + USAGE + DONE, StreamEnd.COMPLETE),
        ("/v1/completions", choice(0) + choice(0, "error") + DONE, StreamEnd.ERROR),
        ("/generate", part(0) + part(0, "abort") + DONE, StreamEnd.ERROR),
        (CHAT, b"e of an event that is longer than the tail" + b"x" * 9000, StreamEnd.COMPLETE),
        (CHAT, delta("a") + USAGE, StreamEnd.COMPLETE),
        (CHAT, delta("a") + USAGE + delta("b"), StreamEnd.MISSING),
        (CHAT, choice(0, "stop") + choice(1), StreamEnd.MISSING),
        (CHAT, choice(1) + choice(0, "stop"), StreamEnd.MISSING),
        (CHAT, choice(1) + choice(0, "stop") + choice(1, "length"), StreamEnd.COMPLETE),
        (CHAT, choice(1) + choice(0, "stop") + USAGE, StreamEnd.COMPLETE),
        ("/v1/completions", choice(1) + choice(0, "stop"), StreamEnd.MISSING),
        ("/generate", part(1) + part(0, "stop"), StreamEnd.MISSING),
        ("/generate", part(1) + part(0, "stop") + part(1, "stop"), StreamEnd.COMPLETE),
        ("/v1/responses", event({"type": "response.cancelled", "response": {}}), StreamEnd.COMPLETE),
        ("/v1/messages", TEXT + event({"type": "message_stop"}), StreamEnd.COMPLETE),
        ("/v1/messages", TEXT, StreamEnd.MISSING),
        ("/v1/messages", SECOND + event({"type": "message_stop"}), StreamEnd.COMPLETE),
        ("/v1/responses", event({"type": "response.completed", "response": {"error": None}}), StreamEnd.COMPLETE),
        ("/v1/responses", event({"type": "response.output_text.delta", "delta": "a"}), StreamEnd.MISSING),
        ("/generate", event({"text": "a", "meta_info": {"finish_reason": {"type": "stop"}}}), StreamEnd.COMPLETE),
        ("/generate", event({"text": "a", "meta_info": {"finish_reason": None}}), StreamEnd.MISSING),
    ],
)
def test_a_stream_has_its_end_or_not(route: str, stream: bytes, end: StreamEnd) -> None:
    assert end_of_stream(route, stream) is end
    assert end_of_stream(route, stream.replace(b"\n", b"\r\n")) is end


@pytest.mark.parametrize(
    ("stream", "is_proven"),
    [
        (delta("a") + STOP, True),
        (delta("a") + DONE, True),
        (delta("a") + STOP + USAGE, True),
        (delta("a") + STOP + b'data: {"choices": [{"del', True),
        (delta("a"), False),
        (choice(0, "stop") + choice(1), False),
        (b"e of an event that is longer than the tail" + b"x" * 9000, False),
        (b"", False),
    ],
)
def test_an_end_is_proven_by_what_has_come_before_a_connection_broke(stream: bytes, is_proven: bool) -> None:
    assert has_end(CHAT, stream) is is_proven


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"error": {"message": "no", "code": 503}}, 503),
        ({"error": {"message": "no", "type": "invalid_request_error"}}, 400),
        ({"object": "error", "message": "no", "code": 404}, 404),
        ({"meta_info": {"finish_reason": {"type": "abort", "status_code": 500}}}, 500),
        ({"choices": [{"message": {"content": "a"}, "finish_reason": "abort"}]}, 500),
        ({"choices": [{"message": {"content": 'an "error" and "abort"'}}]}, None),
        ({"output": [], "error": None}, None),
        ([{"error": "of a batch"}], None),
    ],
)
def test_a_body_is_an_error_or_an_answer(body: Any, status: int | None) -> None:
    assert error_of_body(json.dumps(body).encode()) == status
    assert error_of_body(json.dumps(body).encode()[:-1] + b"error") is None


@pytest.mark.parametrize(
    ("body", "found"), [(b" {} \n", True), (b"[]", True), (b'{"a": 1', False), (b"<html></html>", False), (b"", False)]
)
def test_json_begins_and_ends_with_a_bracket(body: bytes, found: bool) -> None:
    assert is_json(body) is found


@pytest.mark.parametrize(
    ("stream", "usage", "found"),
    [
        (ROLE + delta("a") + STOP + DONE, None, True),
        (ROLE + STOP + DONE, None, True),
        (ROLE + delta("a") + delta("b") + DONE, None, False),
        (delta("a" * 600) + DONE, None, False),
        (delta("a") + DONE, Usage(9, None, 40), False),
        (delta("a") + delta("") + DONE, Usage(9, None, 1), True),
        (delta("a") + DONE, Usage(9, None, None), True),
    ],
)
def test_an_answer_of_one_token_or_none_is_short(stream: bytes, usage: Usage | None, found: bool) -> None:
    assert is_short(CHAT, stream, usage) is found
