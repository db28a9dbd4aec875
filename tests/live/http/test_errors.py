"""The proxy's own answers: status, kind, and when to ask again."""

from __future__ import annotations

import json

import pytest

from gorgo.core.messages.actions import Reject
from gorgo.live.http.errors import HttpError, Message, error_event, error_json, error_of, send_error


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "invalid_request_error"),
        (404, "not_found_error"),
        (408, "invalid_request_error"),
        (413, "invalid_request_error"),
        (429, "rate_limit_error"),
        (499, "invalid_request_error"),
        (500, "server_error"),
        (503, "server_error"),
    ],
)
def test_error_has_the_kind_that_clients_turn_into_an_exception(status: int, kind: str) -> None:
    assert json.loads(error_json(status, "c", "m", {"more": 1})) == {
        "error": {"message": "m", "type": kind, "param": None, "code": "c", "more": 1}
    }


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_error_of_messages_has_anthropics_form_whole_or_in_a_stream(status: int, kind: str) -> None:
    expected = {"type": "error", "error": {"type": kind, "message": "m", "code": "c"}}
    assert json.loads(error_json(status, "c", "m", path="/v1/messages")) == expected
    event = error_event(status, "c", "m", named=True, path="/v1/messages")
    assert event.startswith(b"\n\nevent: error\ndata: ")
    assert json.loads(event.split(b"data: ", 1)[1]) == expected


@pytest.mark.parametrize(
    ("retry_after_s", "headers"),
    [
        (None, ()),
        (0.0, ((b"retry-after", b"1"),)),
        (0.2, ((b"retry-after", b"1"),)),
        (1.0, ((b"retry-after", b"1"),)),
        (1.1, ((b"retry-after", b"2"),)),
        (2.0, ((b"retry-after", b"2"),)),
        (59.01, ((b"retry-after", b"60"),)),
    ],
)
def test_time_to_ask_again_is_whole_seconds_rounded_up_and_at_least_one(
    retry_after_s: float | None, headers: tuple[tuple[bytes, bytes], ...]
) -> None:
    error = error_of(Reject("r", 429, "queue_full", "m", retry_after_s))
    assert (error.status, error.code, error.message, error.headers) == (429, "queue_full", "m", headers)


@pytest.mark.parametrize(
    ("named", "start"), [(False, b"\n\ndata: "), (True, b'\n\nevent: error\ndata: {"type": "error", ')]
)
def test_error_in_a_stream_is_an_event_of_its_own(named: bool, start: bytes) -> None:
    event = error_event(502, "c", "m", named=named)
    assert event.startswith(start)
    assert event.endswith(b"}\n\n")
    line = event.split(b"data: ", 1)[1]
    assert json.loads(line)["error"] == json.loads(error_json(502, "c", "m"))["error"]


async def test_error_is_sent_whole_with_its_own_headers_before_others() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    error = HttpError(429, "c", "m", headers=[(b"retry-after", b"1")])
    await send_error(send, error, [(b"x-request-id", b"r")])
    start, body = sent
    assert (start["type"], start["status"]) == ("http.response.start", 429)
    assert [name for name, _ in start["headers"]] == [
        *(b"content-type", b"content-length", b"date", b"retry-after", b"x-request-id"),
    ]
    assert dict(start["headers"])[b"content-length"] == b"%d" % len(body["body"])
    assert dict(start["headers"])[b"content-type"] == b"application/json"
    assert body == {"type": "http.response.body", "body": error_json(429, "c", "m"), "more_body": False}
