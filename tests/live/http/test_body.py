"""How long a body may take, how one is refused, and the proxy's own answers."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest

from gorgo.config.model import LimitsConfig
from gorgo.core.limits import BufferBudget
from gorgo.core.messages.actions import Reject
from gorgo.live.http.body import ClientDisconnected, RequestBuffer, ResettableTimeout, read_body
from gorgo.live.http.errors import HttpError, Message, error_event, error_json, error_of, send_error
from gorgo.live.http.headers import Header
from tests.lab.sim.live_shell import VirtualLoop

# --- How long a body may take, and how one is refused that is too large.


GONE = None


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
            found = await read_body(receive, headers, limits=limits, buffer=RequestBuffer(BufferBudget(1 << 30), "a"))
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


def test_pieces_of_a_large_body_are_joined_as_they_come() -> None:
    piece, count = 64 * 1024, 64
    left = iter(range(count - 1, -1, -1))

    async def receive() -> Message:
        # Made when it is due, so that nothing but the reader refers to it.
        return {"type": "http.request", "body": bytes(piece), "more_body": next(left) > 0}

    async def run() -> tuple[bytes, int]:
        limits, buffer = LimitsConfig(max_body_bytes=piece * count), RequestBuffer(BufferBudget(1 << 30), "a")
        tracemalloc.start()
        try:
            body = await read_body(receive, [], limits=limits, buffer=buffer)
            return body, tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    body, peak = asyncio.run(run())
    assert body == bytes(piece * count)
    assert peak < 1.5 * len(body)


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


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


async def test_expiry_is_a_timeout_and_leaves_no_cancellation_behind() -> None:
    with pytest.raises(TimeoutError), ResettableTimeout(0.01):
        await forever()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(0)


async def test_deadline_moved_later_is_kept() -> None:
    loop = asyncio.get_running_loop()
    started = loop.time()
    dog = ResettableTimeout(0.01)
    dog.deadline += 0.05
    with pytest.raises(TimeoutError), dog:
        await forever()
    assert loop.time() - started >= 0.05


async def test_deadline_moved_nearer_is_kept() -> None:
    async def guarded() -> None:
        with ResettableTimeout(1000) as dog:
            dog.extend(0.01)
            await forever()

    with pytest.raises(TimeoutError):
        await guarded()


async def test_deadline_moved_before_the_wait_is_kept() -> None:
    loop = asyncio.get_running_loop()
    dog = ResettableTimeout(1000)
    dog.extend(0.01)
    assert dog.deadline <= loop.time() + 0.01
    with pytest.raises(TimeoutError), dog:
        await forever()


async def test_last_moment_counts_only_for_one_that_expired() -> None:
    assert not ResettableTimeout(1000, last=asyncio.get_running_loop().time() - 1.0).timed_out


async def test_last_moment_is_kept_wherever_the_deadline_is_moved_to() -> None:
    loop = asyncio.get_running_loop()
    dog = ResettableTimeout(1000, last=loop.time() + 0.01)
    dog.deadline += 1000
    with pytest.raises(TimeoutError), dog:
        await forever()
    assert dog.timed_out


async def test_expiry_before_the_last_moment_is_not_the_end_of_all_time() -> None:
    dog = ResettableTimeout(0.01, last=asyncio.get_running_loop().time() + 1000)
    with pytest.raises(TimeoutError), dog:
        await forever()
    assert not dog.timed_out


async def test_cancellation_by_another_counts_more_than_expiry() -> None:
    async def guarded() -> None:
        with ResettableTimeout(1000) as dog:
            dog.expired = True
            asyncio.current_task().cancel()  # type: ignore[union-attr]
            await forever()

    task = asyncio.create_task(guarded())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_errors_inside_pass() -> None:
    with pytest.raises(KeyError), ResettableTimeout(1000):
        raise KeyError


async def _moved(dog: ResettableTimeout, by_s: float) -> None:
    dog.deadline += by_s
    await forever()


async def test_each_of_many_timeouts_expires_in_its_own_time() -> None:
    loop = asyncio.get_running_loop()
    started = loop.time()

    async def expired_after(limit_s: float, moved_s: float) -> float:
        dog = ResettableTimeout(limit_s)
        with pytest.raises(TimeoutError), dog:
            await _moved(dog, moved_s)
        return loop.time() - started

    limits = [(0.05, 0.0), (0.01, 0.06), (0.02, 0.0)]
    spent = await asyncio.gather(*(expired_after(*limit) for limit in limits))
    assert all(each >= sum(limit) - 0.002 for each, limit in zip(spent, limits, strict=True))
    assert spent[2] < spent[0] < spent[1]


async def test_timeouts_that_do_not_expire_set_the_timer_of_the_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    delays: list[float] = []
    call_later = loop.call_later

    def counted(delay: float, *rest: Any) -> asyncio.TimerHandle:
        delays.append(delay)
        return call_later(delay, *rest)

    monkeypatch.setattr("gorgo.live.http.body._latest", None)
    monkeypatch.setattr(loop, "call_later", counted, raising=False)
    for number in range(100):
        with ResettableTimeout(1000.0 + number) as dog:
            dog.extend(1000.0 + number)
    assert len(delays) == 1


# --- The proxy's own answers: status, kind, and when to ask again.


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
