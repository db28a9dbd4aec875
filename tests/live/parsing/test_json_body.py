"""What a body may be, and how it is edited."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import pytest

from gorgo.core.numeric import QUICK_VALUES, TINY_BYTES
from gorgo.core.prompt.fingerprint import Fingerprinter
from gorgo.live.http.errors import HttpError
from gorgo.live.http.headers import Header, RequestHeaders
from gorgo.live.parsing.json_body import (
    MAX_BRACKETS,
    MAX_DIGITS,
    MAX_VALUES,
    UNCOUNTED_BYTES,
    check_counts,
    check_media_type,
    limit_digits,
    model_spans,
    parse_body,
    read_fields,
    read_quick_fields,
    request_usage,
    with_model,
)

JSON = (b"content-type", b"application/json")


def status_of(body: bytes, *headers: Header) -> int:
    """200 for a body that is taken."""
    try:
        check_media_type(headers)
        parse_body(body)
    except HttpError as error:
        return error.status
    return 200


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (None, 200),
        (b"application/json", 200),
        (b"Application/JSON ; charset=utf-8", 200),
        (b"application/problem+json", 200),
        (b"application/jsonx", 415),
        (b"application/+jsonx", 415),
        (b"text/x+json", 415),
        (b"text/plain; application/json", 415),
        (b"", 415),
    ],
)
def test_content_type_is_json_or_not_said(kind: bytes | None, status: int) -> None:
    assert status_of(b"{}", *([] if kind is None else [(b"content-type", kind)])) == status


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"[]", "invalid_json"),
        (b"null", "invalid_json"),
        (b'"text"', "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
    ],
)
def test_what_is_no_object_is_refused(body: bytes, code: str) -> None:
    with pytest.raises(HttpError) as caught:
        parse_body(body)
    assert (caught.value.status, caught.value.code) == (400, code)


def test_coding_of_a_body_is_found_once_for_headers_that_are_repeated() -> None:
    assert status_of(b"{}", JSON, (b"content-encoding", b"compress")) == 415
    assert status_of(b"{}", JSON, (b"content-encoding", b"identity")) == 200
    for value, coding in ((b"gzip", "gzip"), (b"identity", None)):
        headers = RequestHeaders([JSON, (b"content-encoding", value)])
        assert check_media_type(headers) == coding
        assert check_media_type(RequestHeaders(headers, headers.findings)) == coding


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (b'{"a":[' + b"[]," * (MAX_BRACKETS - 3) + b"[]]}", 200),
        (b'{"a":[' + b"[]," * (MAX_BRACKETS - 2) + b"[]]}", 400),
        (b'{"[":[' + b"[]," * (MAX_BRACKETS - 3) + b"[]]}", 400),
        (b'{"a":[' + b"0," * (MAX_VALUES - 2) + b"0]}", 200),
        (b'{"a":[' + b"0," * (MAX_VALUES - 1) + b"0]}", 400),
        (b'{"a":"' + b"," * (MAX_VALUES + 1) + b'"}', 400),
    ],
    ids=["lists", "too many lists", "a bracket in a text", "values", "too many values", "commas in a text"],
)
def test_lists_objects_and_values_of_a_body_are_counted_before_its_parse(text: bytes, status: int) -> None:
    found = 200
    try:
        check_counts(text)
    except HttpError as error:
        found = error.status
    assert found == status


def test_number_of_more_digits_than_any_field_has_is_refused() -> None:
    before = sys.get_int_max_str_digits()
    limit_digits()
    try:
        assert parse_body(b'{"a":' + b"9" * MAX_DIGITS + b"}")
        with pytest.raises(HttpError, match="at most 640 digits"):
            parse_body(b'{"a":9' + b"9" * MAX_DIGITS + b"}")
    finally:
        sys.set_int_max_str_digits(before)


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        (b'{"a":1}', b'{"a":1,"stream_options":{"include_usage":true}}'),
        (b'{"a":{}} \n', b'{"a":{},"stream_options":{"include_usage":true}} \n'),
    ],
)
def test_usage_is_asked_for_as_the_last_key(body: bytes, wanted: bytes) -> None:
    assert request_usage(body) == wanted


@pytest.mark.parametrize(
    "body", [b'{"model":"a", "x":[1], "model" : "\xc3\xa9"}', b'{"\xc3\xa9":"\xed\xa0\x80","model":7}', b"{}"]
)
def test_name_of_a_model_is_replaced_at_known_places_as_after_a_parse(body: bytes) -> None:
    assert with_model(body, "new", model_spans(body)) == with_model(body, "new")


FINGERPRINTER = Fingerprinter(key=7)
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
#: More values than another process is spared for, in a text that is long enough to be counted.
NUMBERS = [0] * (2 * QUICK_VALUES)


def chat(*texts: str, **more: Any) -> bytes:
    messages = [{"role": "user", "content": text} for text in texts]
    return json.dumps({"model": "m", "messages": messages, **more}).encode()


@pytest.mark.parametrize(
    ("route", "body"),
    [
        (CHAT, chat("a, b [c] {d}" * 4000)),
        (CHAT, chat(*["é, " * 100] * 60)),
        (CHAT, chat("a" * TINY_BYTES, logit_bias=NUMBERS)),
        (COMPLETIONS, json.dumps({"model": "m", "prompt": "a, " * 20_000, "stream": True}).encode()),
    ],
)
def test_texts_are_read_here_and_as_ever_whatever_they_and_other_fields_have(route: str, body: bytes) -> None:
    assert TINY_BYTES < len(body) <= UNCOUNTED_BYTES
    found, known = read_quick_fields(route, body, FINGERPRINTER), read_fields(route, body, FINGERPRINTER)
    assert found is not None
    assert found.values == known.values
    assert found.prompt == known.prompt
    assert found.tokens is known.tokens is None
    assert np.array_equal(found.sketch.sums, known.sketch.sums)
    assert found.sketch.message_ends == known.sketch.message_ends


@pytest.mark.parametrize(
    ("route", "body"),
    [
        (CHAT, chat("a", tools=NUMBERS)),
        (CHAT, chat("a", functions=NUMBERS)),
        (CHAT, chat("a" * UNCOUNTED_BYTES, tools=NUMBERS)),
        (CHAT, json.dumps({"messages": [{"role": "user", "content": [{"text": ""}] * 6000}]}).encode()),
        (CHAT, json.dumps({"messages": NUMBERS}).encode()),
        (COMPLETIONS, json.dumps({"prompt": NUMBERS}).encode()),
        (CHAT, b"[" + b"NaN," * (QUICK_VALUES + 1)),
    ],
)
def test_many_values_that_would_be_read_are_left_to_another_process(route: str, body: bytes) -> None:
    assert read_quick_fields(route, body, FINGERPRINTER) is None


@pytest.mark.parametrize("body", [chat("a" * TINY_BYTES)[:-1], b"[" + b" " * TINY_BYTES + b"]", b'{"messages":[]}'])
def test_what_is_no_request_is_refused_in_the_same_words(body: bytes) -> None:
    with pytest.raises(HttpError) as known:
        read_fields(CHAT, body, FINGERPRINTER)
    with pytest.raises(HttpError) as found:
        read_quick_fields(CHAT, body, FINGERPRINTER)
    assert (found.value.status, found.value.message) == (known.value.status, known.value.message)
