"""What a body may be, how long it may take, and how one is refused that is too large."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from gorgo.config.model import LimitsConfig
from gorgo.proxy.http import body as body_module
from gorgo.proxy.http.body import MAX_BRACKETS, ClientDisconnected, parse_body, read_body, request_usage
from gorgo.proxy.http.errors import HttpError, Message
from gorgo.proxy.http.headers import Header
from tests.sim.live_shell import VirtualLoop

JSON = (b"content-type", b"application/json")
GONE = None


def status_of(body: bytes, *headers: Header) -> int:
    """200 for a body that is taken."""
    try:
        parse_body(body, headers)
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
        parse_body(body, [JSON])
    assert (caught.value.status, caught.value.code) == (400, code)


def test_body_with_an_encoding_is_not_read() -> None:
    assert status_of(b"{}", JSON, (b"content-encoding", b"gzip")) == 415
    assert status_of(b"{}", JSON, (b"content-encoding", b"identity")) == 200


@pytest.mark.parametrize(("lists", "taken"), [(9, True), (10, False)])
def test_lists_and_objects_of_a_body_are_counted_together(
    lists: int, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MAX_BRACKETS == 1_048_576
    monkeypatch.setattr(body_module, "MAX_BRACKETS", 10)
    text = b'{"a":[' + b",".join([b"[]"] * (lists - 2)) + b"]" + b" " * 20 + b"}"
    assert text.count(b"[") + text.count(b"{") == lists
    assert status_of(text, JSON) == 200
    assert status_of(text.replace(b'"a":', b'"a":[{}],"b":'), JSON) == (200 if lists + 2 <= 10 else 400)
    assert status_of(text.replace(b'"a":', b'"[":'), JSON) == (200 if taken else 400), "one in a text counts too"


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        (b'{"a":1}', b'{"a":1,"stream_options":{"include_usage":true}}'),
        (b'{"a":{}} \n', b'{"a":{},"stream_options":{"include_usage":true}} \n'),
    ],
)
def test_usage_is_asked_for_as_the_last_key(body: bytes, wanted: bytes) -> None:
    assert request_usage(body) == wanted


# -- reading


def read(
    pieces: Sequence[bytes | float | None], *headers: Header, limit: int = 10, left: list[Any] | None = None
) -> tuple[float, object]:
    """When a read ends, in virtual time, and with what: the body, a status, or `GONE`.

    `pieces` come one after another, numbers are pauses, s. `left` takes what was not read.
    """
    waiting = list(pieces)

    async def receive() -> Message:
        while waiting and isinstance(waiting[0], float):
            await asyncio.sleep(float(waiting.pop(0) or 0.0))
        if not waiting:
            await asyncio.get_running_loop().create_future()
        piece = waiting.pop(0)
        if piece is GONE:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": piece, "more_body": bool(waiting)}

    async def run() -> tuple[float, object]:
        loop = asyncio.get_running_loop()
        limits = LimitsConfig(max_body_bytes=limit)
        found: object
        try:
            found = await read_body(receive, headers, limits=limits)
        except HttpError as error:
            found = error.status
        except ClientDisconnected:
            found = GONE
        if left is not None:
            left.extend(waiting)
        return loop.time(), found

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(run())


@pytest.mark.parametrize(
    ("pieces", "headers", "found"),
    [
        ([b""], [], b""),
        ([b"abc"], [], b"abc"),
        ([b"abc", b"", b"de"], [], b"abcde"),
        ([b"x" * 10], [(b"content-length", b"10")], b"x" * 10),
        ([b"x" * 5, b"x" * 5], [], b"x" * 10),
        ([b"x" * 11], [(b"content-length", b"11")], 413),
        ([b"abc"], [(b"content-length", b"many")], b"abc"),
        ([b"abc", GONE], [], GONE),
        ([GONE], [], GONE),
        ([b"x" * 11, GONE], [], GONE),
    ],
)
def test_body_is_read_up_to_its_limit(pieces: list[bytes | float | None], headers: list[Header], found: object) -> None:
    assert read(pieces, *headers) == (0.0, found)


@pytest.mark.parametrize("pieces", [[b"x" * 11], [b"x" * 5, b"x" * 6]])
def test_body_that_turns_out_too_large_is_refused_when_nothing_follows(pieces: list[bytes | float | None]) -> None:
    assert read(pieces) == (0.5, 413)


def test_as_much_again_is_swallowed_of_a_body_that_is_too_large() -> None:
    left: list[Any] = []
    # Nothing is read before the refusal where the length says so, and 4 + 4 + 4 of at least 10 bytes after it.
    assert read([b"x" * 4] * 6, (b"content-length", b"24"), left=left) == (0.0, 413)
    assert left == [b"x" * 4] * 3
    left.clear()
    assert read([b"x" * 5] * 4, (b"content-length", b"20"), left=left) == (0.0, 413)
    assert left == [b"x" * 5] * 2


def test_client_that_stops_in_a_body_that_is_too_large_is_answered_after_half_a_second() -> None:
    ended_s, found = read([b"x" * 4, 0.4, b"x" * 4, 9.0, b"x"], (b"content-length", b"24"))
    assert (round(ended_s, 6), found) == (0.9, 413)
