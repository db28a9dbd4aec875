"""A request's body: read within a bound and a time, parsed once, never dumped again.

Owns 400, 408, 413 and 415. The bytes that came are the bytes that go to the replica; the parsed form only serves to
route. One exception: `request_usage` puts an option into a body without touching any other byte.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from time import monotonic
from typing import Any, NoReturn

from gorgo.config.model import LimitsConfig
from gorgo.proxy.http.errors import HttpError, Message, Receive
from gorgo.proxy.http.headers import Header, find, is_encoded
from gorgo.proxy.http.timeout import ResettableTimeout

#: Lists and objects of one body, and brackets in its texts: megabytes of source code have fewer. 32 MiB may be sixteen
#: million of them, which take everybody else's turn for seconds, and a gigabyte.
MAX_BRACKETS = 1 << 20
#: Longest pause between two pieces of a body: several retransmissions of a lossy path.
IDLE_TIMEOUT_S = 15.0
#: A client that is writing does not pause for so long.
_LINGER_S = 0.5


class ClientDisconnected(Exception):  # noqa: N818 - reads as the fact
    """The client closed its connection before its request was complete."""


async def read_body(receive: Receive, headers: Iterable[Header], *, limits: LimitsConfig) -> bytes:
    """The whole body. Raises `ClientDisconnected`, or `HttpError` for one that is too large or too slow."""
    try:
        with ResettableTimeout(min(limits.body_timeout_s, IDLE_TIMEOUT_S)) as timeout:
            return await _gather(_watched(receive, timeout, limits), headers, limits.max_body_bytes)
    except TimeoutError:
        limit = f"{limits.body_timeout_s:g} s, or stopped for {IDLE_TIMEOUT_S:g} s"
        raise HttpError(408, "request_timeout", f"the body was not complete within {limit}") from None


def _watched(receive: Receive, timeout: ResettableTimeout, limits: LimitsConfig) -> Receive:
    """`receive` that grants the next piece its time, within that of the whole."""
    end = monotonic() + limits.body_timeout_s

    async def watched() -> Message:
        message = await receive()
        timeout.deadline = min(end, monotonic() + IDLE_TIMEOUT_S)
        return message

    return watched


def parse_body(body: bytes, headers: Sequence[Header]) -> dict[str, Any]:
    """The body as an object. A missing content type is taken for JSON, as engines do."""
    if is_encoded(headers):
        # A replica would unpack what is read here as it came.
        raise HttpError(415, "unsupported_media_type", "expected a body without content-encoding")
    kind = find(headers, b"content-type")
    if kind is not None and not _is_json(kind):
        raise HttpError(415, "unsupported_media_type", "expected the content type application/json")
    if len(body) > MAX_BRACKETS and body.count(b"[") + body.count(b"{") > MAX_BRACKETS:
        raise HttpError(400, "invalid_json", f"expected at most {MAX_BRACKETS} lists and objects in the body")
    try:
        parsed = json.loads(body)
    except ValueError:
        raise HttpError(400, "invalid_json", "the body is not JSON") from None
    except RecursionError:
        raise HttpError(400, "invalid_json", "the body is nested too deeply") from None
    if not isinstance(parsed, dict):
        raise HttpError(400, "invalid_json", "expected a JSON object as the body")
    return parsed


def request_usage(body: bytes) -> bytes:
    """The same object with `stream_options` as its last key; every other byte as it was.

    >>> request_usage(b'{"stream": true }')
    b'{"stream": true ,"stream_options":{"include_usage":true}}'
    """
    end = body.rindex(b"}")
    return body[:end] + b',"stream_options":{"include_usage":true}' + body[end:]


@asynccontextmanager
async def draining(receive: Receive) -> AsyncIterator[None]:
    """Take and drop what the client still sends while an answer goes out that does not need it.

    A server queues only so much of a body; with the queue full it could not even tell us that the client left.
    """
    task = asyncio.create_task(discard(receive))
    try:
        yield
    finally:
        task.cancel()


async def discard(receive: Receive) -> NoReturn:
    """Take what comes, until cancelled: pieces may wait behind the word that the client has left."""
    while True:
        await receive()


async def _gather(receive: Receive, headers: Iterable[Header], limit: int) -> bytes:
    declared = find(headers, b"content-length")
    if declared is not None and declared.isdigit() and int(declared) > limit:
        await _refuse(receive, limit)
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
            await _refuse(receive, limit)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def _refuse(receive: Receive, limit: int) -> None:
    """Swallow as much again, so that a client which reads only after it has written can read the answer.

    One that stops to write waits for it: it announced too much, or wants to be told to go on.
    """
    left, now = limit, asyncio.get_running_loop().time
    with suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S) as patience:
            while left > 0:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnected
                left -= len(message.get("body", b""))
                if not message.get("more_body", False):
                    break
                patience.reschedule(now() + _LINGER_S)
    raise HttpError(413, "request_too_large", f"the body is larger than {limit} bytes")


def _is_json(content_type: bytes) -> bool:
    kind = content_type.split(b";", 1)[0].strip().lower()
    return kind == b"application/json" or (kind.startswith(b"application/") and kind.endswith(b"+json"))
