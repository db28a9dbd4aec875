"""A request's body: read within limits of size and time, parsed once.

Owns the statuses 400, 408, 413 and 415. The replica gets the bytes as they came; the parsed form only serves to route.
One exception: `request_usage` adds an option to a body without changing any other byte.
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

#: Lists and objects of one body, and brackets in its texts: megabytes of source code have fewer. 32 MiB can be sixteen
#: million of them: a gigabyte, and seconds in which no other request is served.
MAX_BRACKETS = 1 << 20
#: Longest pause between two pieces of a body: several retransmissions of a lossy path.
IDLE_TIMEOUT_S = 15.0
#: Longest pause of a client that is still writing a rejected body.
_LINGER_S = 0.5
_DECODER = json.JSONDecoder()


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


def parse_body(body: bytes, headers: Sequence[Header]) -> dict[str, Any]:
    """Return the body as an object. Without a content type it is read as JSON, as engines do."""
    if is_encoded(headers):
        # A replica would decode the body; it is parsed here as it came.
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
    """Return the same object with `stream_options` as its last key.

    >>> request_usage(b'{"stream": true }')
    b'{"stream": true ,"stream_options":{"include_usage":true}}'
    """
    end = body.rindex(b"}")
    return body[:end] + b',"stream_options":{"include_usage":true}' + body[end:]


def with_model(body: bytes, name: str) -> bytes:
    """Return the same object with another value of `model`; every other byte stays. Raises `HttpError` as `parse_body`.

    >>> with_model(b'{"model": "gpt-4", "messages": [{"model": 1.50}]}', "llama")
    b'{"model": "llama", "messages": [{"model": 1.50}]}'
    """
    encoding = json.detect_encoding(body)
    try:
        return _with_model(body.decode(encoding, "surrogatepass"), name).encode(encoding, "surrogatepass")
    except RecursionError:
        # Parsed once already, by a caller with a few frames less.
        raise HttpError(400, "invalid_json", "the body is nested too deeply") from None


def _with_model(text: str, name: str) -> str:
    parts: list[str] = []
    done, place = 0, _past_blanks(text, text.index("{") + 1)
    while text[place] != "}":
        key, place = _DECODER.raw_decode(text, place)
        start = _past_blanks(text, _past_blanks(text, place) + 1)
        _, end = _DECODER.raw_decode(text, start)
        if key == "model":
            parts += [text[done:start], json.dumps(name)]
            done = end
        place = _past_blanks(text, end)
        if text[place] == ",":
            place = _past_blanks(text, place + 1)
    return "".join([*parts, text[done:]])


def _past_blanks(text: str, place: int) -> int:
    while text[place] in " \t\r\n":
        place += 1
    return place


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


def _is_json(content_type: bytes) -> bool:
    kind = content_type.split(b";", 1)[0].strip().lower()
    return kind == b"application/json" or (kind.startswith(b"application/") and kind.endswith(b"+json"))
