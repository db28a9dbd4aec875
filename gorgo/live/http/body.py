"""A request's body: read within limits of size and time.

Owns the statuses 408 and 413; 503 is `request_buffer`'s. See `gorgo.live.parsing` for what the bytes mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from functools import partial
from io import BytesIO
from time import monotonic

from gorgo.config.model import LimitsConfig
from gorgo.live.http.errors import HttpError, Message, Receive
from gorgo.live.http.headers import Header, find
from gorgo.live.http.request_buffer import RequestBuffer
from gorgo.live.http.timeout import ResettableTimeout

#: Longest pause between two pieces of a body: several retransmissions of a lossy path.
IDLE_TIMEOUT_S = 15.0
#: Longest pause of a client that is still writing a rejected body.
_LINGER_S = 0.5
#: Pieces of a larger body are copied as they come: to join 32 MiB at the end would hold the event loop for 20 ms.
JOINED_BYTES = 1024 * 1024


class ClientDisconnected(Exception):  # noqa: N818 - reads as the fact
    """The client disconnected before its request was complete."""


async def read_body(
    receive: Receive, headers: Iterable[Header], *, limits: LimitsConfig, buffer: RequestBuffer
) -> bytes:
    """Return the whole body, reserved in `buffer`.

    Raises `ClientDisconnected`, or `HttpError` for a body too large or too slow, or without memory for it.
    """
    try:
        with ResettableTimeout(min(limits.body_timeout_s, IDLE_TIMEOUT_S)) as timeout:
            buffer.begin_upload(partial(timeout.extend, 0.0))
            receive = _with_timeout(receive, timeout, limits)
            return await _gather(receive, headers, min(limits.max_body_bytes, buffer.body_limit), buffer)
    except TimeoutError:
        if buffer.evicted:
            raise buffer.eviction() from None
        limit = f"within {limits.body_timeout_s:g} s, with pauses of at most {IDLE_TIMEOUT_S:g} s"
        raise HttpError(408, "request_timeout", f"expected the whole body {limit}") from None


def take_whole_body(body: bytes, *, limits: LimitsConfig, buffer: RequestBuffer) -> bytes:
    """Return a body that came with its head, reserved in `buffer`. Raises `HttpError` for one too large."""
    limit = min(limits.max_body_bytes, buffer.body_limit)
    if len(body) > limit:
        raise _too_large(limit)
    buffer.reserve_body(len(body))
    return body


def _with_timeout(receive: Receive, timeout: ResettableTimeout, limits: LimitsConfig) -> Receive:
    """Return `receive` with a timeout for each piece, within that of the whole body."""
    end = monotonic() + limits.body_timeout_s

    async def receive_in_time() -> Message:
        message = await receive()
        timeout.deadline = min(end, monotonic() + IDLE_TIMEOUT_S)
        return message

    return receive_in_time


@asynccontextmanager
async def draining(receive: Receive) -> AsyncIterator[None]:
    """Discard the rest of the body while a response is sent that does not need it.

    The connection reads a part of a body only; unread, it does not notice that the client disconnected.
    """
    task = asyncio.create_task(discard(receive))
    try:
        yield
    finally:
        task.cancel()


async def discard(receive: Receive) -> None:
    """Receive and drop messages until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _gather(receive: Receive, headers: Iterable[Header], limit: int, buffer: RequestBuffer) -> bytes:
    try:
        declared = find(headers, b"content-length")
        if declared is not None and declared.isdigit():
            size = int(declared)
            if size > limit:
                raise _too_large(limit)
            buffer.reserve_body(size)
        return await _collect(receive, limit, buffer)
    except HttpError as refused:
        if refused.status != 408:
            await _discard_rest(receive, limit)
        raise
    finally:
        buffer.end_upload()


async def _collect(receive: Receive, limit: int, buffer: RequestBuffer) -> bytes:
    """Return the body."""
    parts: list[bytes] = []
    joined, size = BytesIO(), 0
    try:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            chunk: bytes = message.get("body", b"")
            size += len(chunk)
            if size > limit:
                raise _too_large(limit)
            buffer.received(len(chunk), size)
            if chunk:
                parts.append(chunk)
            if size > JOINED_BYTES:
                joined.writelines(parts)
                parts.clear()
            if not message.get("more_body", False):
                if size > JOINED_BYTES:
                    return joined.getvalue()
                return parts[0] if len(parts) == 1 else b"".join(parts)
    finally:
        # The traceback of a failure refers to both while the error is sent.
        parts.clear()
        joined.close()


def _too_large(limit: int) -> HttpError:
    return HttpError(413, "request_too_large", f"the body is larger than {limit} bytes")


async def _discard_rest(receive: Receive, limit: int) -> None:
    """Discard up to `limit` more bytes of a refused body: some clients read only after they have written.

    A client that pauses is waiting for the response.
    """
    left, now = limit, asyncio.get_running_loop().time
    with suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S) as pause:
            while left > 0:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnected
                left -= len(message.get("body", b""))
                if not message.get("more_body", False):
                    break
                pause.reschedule(now() + _LINGER_S)
