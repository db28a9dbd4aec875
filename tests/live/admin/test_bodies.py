"""What a call of the admin API may hold in its body and its query."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.requests import Request

from gorgo.live.admin.bodies import (
    BODY_S,
    MAX_BODY_BYTES,
    MAX_TEXT,
    BoundedBodies,
    Check,
    count_of,
    is_count,
    is_flag,
    is_text,
    is_weights,
    json_response,
    parse_body,
    read_body,
)
from gorgo.live.http.errors import HttpError, Message
from tests.lab.sim.live_shell import VirtualLoop


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (is_count, [0, 1, 2**60], [-1, 1.0, "1", True, None, []]),
        (is_flag, [True, False], [0, 1, "true", None]),
        (
            is_text,
            ["", "x" * MAX_TEXT, "ü", "\U0001f408"],
            ["x" * (MAX_TEXT + 1), "\ud800", "a\udfffb", 1, None, ["a"]],
        ),
        (is_weights, [{}, {"a": 1, "b": 0.5}], [[1.0], {"a": "1"}, {"a": True}, {"a": float("nan")}, 1, "a", None]),
    ],
)
def test_value_is_of_its_kind(check: Check, good: list[object], bad: list[object]) -> None:
    assert [value for value in good if not check(value)] == []
    assert [value for value in bad if check(value)] == []


KEYS: dict[str, tuple[Check, str]] = {"draining": (is_flag, "true or false"), "by": (is_text, "a name")}


@pytest.mark.parametrize("body", [{}, {"draining": True}, {"draining": None, "by": "me"}])
def test_body_with_known_keys_is_taken(body: dict[str, Any]) -> None:
    parse_body(body, KEYS)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"drain": True}, "'drain': unknown key; expected draining, by"),
        ({"draining": 1}, "draining: expected true or false"),
        ({"by": "me", "draining": "no"}, "draining: expected true or false"),
        ({"x" * 100: 1}, f"{'x' * 60!r}: unknown key; expected draining, by"),
    ],
)
def test_body_with_another_key_or_value_is_a_400_that_says_what_was_expected(
    body: dict[str, Any], message: str
) -> None:
    with pytest.raises(HttpError) as refusal:
        parse_body(body, KEYS)
    assert (refusal.value.status, refusal.value.code, refusal.value.message) == (400, "invalid_request", message)


def request_of(*pieces: bytes, query: bytes = b"") -> Request:
    messages = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    messages.append({"type": "http.request", "body": b"", "more_body": False})

    async def receive() -> Message:
        return messages.pop(0)

    return Request({"type": "http", "method": "POST", "headers": [], "query_string": query, "path": "/"}, receive)


@pytest.mark.parametrize(
    ("pieces", "parsed"),
    [((), {}), ((b" ", b"\n"), {}), ((b"{}",), {}), ((b'{"a"', b": 1}"), {"a": 1}), ((b" " * MAX_BODY_BYTES,), {})],
)
async def test_empty_body_is_an_empty_object(pieces: tuple[bytes, ...], parsed: dict[str, Any]) -> None:
    assert await read_body(request_of(*pieces)) == parsed


@pytest.mark.parametrize(
    ("pieces", "status", "code"),
    [
        ((b"[]",), 400, "invalid_json"),
        ((b"null",), 400, "invalid_json"),
        ((b"{",), 400, "invalid_json"),
        ((b"[" * 60_000,), 400, "invalid_json"),
        ((b" " * MAX_BODY_BYTES, b" "), 413, "request_too_large"),
    ],
)
async def test_body_that_is_no_object_or_too_large_is_refused(
    pieces: tuple[bytes, ...], status: int, code: str
) -> None:
    with pytest.raises(HttpError) as refusal:
        await read_body(request_of(*pieces))
    assert (refusal.value.status, refusal.value.code) == (status, code)


@pytest.mark.parametrize(("query", "count"), [(b"", 7), (b"n=0", 0), (b"n=" + b"9" * 18, 10**18 - 1)])
def test_number_in_the_query_is_whole(query: bytes, count: int) -> None:
    assert count_of(request_of(query=query), "n", 7) == count


@pytest.mark.parametrize("query", [b"n=", b"n=-1", b"n=1.0", b"n=%D9%A1", b"n=" + b"9" * 19, b"n=a"])
def test_other_numbers_in_the_query_are_a_400(query: bytes) -> None:
    with pytest.raises(HttpError) as refusal:
        count_of(request_of(query=query), "n", 7)
    assert (refusal.value.status, refusal.value.message) == (400, "n: expected a whole number")


def test_answer_is_json_with_its_status() -> None:
    response = json_response({"a": 1}, 201)
    assert (response.status_code, response.body, response.media_type) == (201, b'{"a": 1}', "application/json")


LENGTH = [(b"content-length", b"9")]


def bounded(headers: list[tuple[bytes, bytes]], pieces: list[float | bytes], *, reads: bool) -> tuple[float, int, int]:
    """When an app behind the bound ends, with which status (408 where it is out of time), and what is left unread."""

    async def run() -> tuple[float, int, int]:
        loop, messages = asyncio.get_running_loop(), asyncio.Queue[Message]()
        status = 0

        async def arrive() -> None:
            for step in pieces:
                if isinstance(step, float):
                    await asyncio.sleep(step)
                else:
                    messages.put_nowait({"type": "http.request", "body": step, "more_body": step != b"end"})

        async def app(_: Message, receive: Any, send: Any) -> None:
            while reads and (await receive())["more_body"]:
                pass
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await asyncio.sleep(1.0)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        async def send(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)

        arriving = asyncio.create_task(arrive())
        try:
            await BoundedBodies(app)({"type": "http", "headers": headers}, messages.get, send)
        except HttpError as refusal:
            status = refusal.status
        arriving.cancel()
        await asyncio.sleep(0)
        return round(loop.time(), 6), status, messages.qsize()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(run())


def test_body_has_its_time_in_all_however_it_comes() -> None:
    assert BODY_S == 10.0
    assert bounded(LENGTH, [b"a", 9.0, b"end"], reads=True) == (10.0, 200, 0)
    assert bounded(LENGTH, [b"a", 9.0, b"b", 9.0, b"end"], reads=True) == (10.0, 408, 0)
    assert bounded([(b"transfer-encoding", b"chunked")], [1000.0], reads=True) == (10.0, 408, 0)


def test_body_that_is_not_read_is_dropped_while_the_answer_goes_out() -> None:
    assert bounded(LENGTH, [b"a", b"b", b"end"], reads=False) == (1.0, 200, 0)


@pytest.mark.parametrize("headers", [[], [(b"content-length", b"0")]])
def test_request_without_a_body_is_the_apps_alone(headers: list[tuple[bytes, bytes]]) -> None:
    assert bounded(headers, [b"a", b"end"], reads=False) == (1.0, 200, 2)
