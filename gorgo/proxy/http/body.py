"""A request's body: read within limits of size and time.

Owns the statuses 408 and 413. See `gorgo.proxy.parsing` for what the bytes mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from time import monotonic
from typing import NoReturn

from gorgo.config.model import LimitsConfig
from gorgo.proxy.http.errors import HttpError, Message, Receive
from gorgo.proxy.http.headers import Header, find
from gorgo.proxy.http.timeout import ResettableTimeout

#: Longest pause between two pieces of a body: several retransmissions of a lossy path.
IDLE_TIMEOUT_S = 15.0
#: Longest pause of a client that is still writing a rejected body.
_LINGER_S = 0.5


class ClientDisconnected(Exception):  # noqa: N818 - reads as the fact
    """The client disconnected before its request was complete."""


async def read_body(receive: Receive, headers: Iterable[Header], *, limits: LimitsConfig) -> bytes:
    """Return the whole body. Raises `ClientDisconnected`, or `HttpError` for a body too large or too slow."""
    try:
        with ResettableTimeout(min(limits.body_timeout_s, IDLE_TIMEOUT_S)) as timeout:
            return await _gather(_with_timeout(receive, timeout, limits), headers, limits.max_body_bytes)
    except TimeoutError:
        limit = f"within {limits.body_timeout_s:g} s, with pauses of at most {IDLE_TIMEOUT_S:g} s"
        raise HttpError(408, "request_timeout", f"expected the whole body {limit}") from None


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

    hypercorn queues a part of a body only; with the queue full it does not report that the client disconnected.
    """
    task = asyncio.create_task(discard(receive))
    try:
        yield
    finally:
        task.cancel()


async def discard(receive: Receive) -> NoReturn:
    """Receive and drop messages until cancelled."""
    while True:
        await receive()


async def _gather(receive: Receive, headers: Iterable[Header], limit: int) -> bytes:
    declared = find(headers, b"content-length")
    if declared is not None and declared.isdigit() and int(declared) > limit:
        await _reject(receive, limit)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            parts.clear()
            await _reject(receive, limit)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def _reject(receive: Receive, limit: int) -> None:
    """Discard up to `limit` more bytes, then raise 413: some clients read only after they have written.

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
    raise HttpError(413, "request_too_large", f"the body is larger than {limit} bytes")
