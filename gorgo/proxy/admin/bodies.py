"""Reading an admin call's body and answering in JSON.

Owns the bounds and the errors of a body, whether a route reads it or not. A key that a route does not know is refused:
a misspelt `expected_version` must not turn a guarded write into one that goes through.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from gorgo.core.numeric import is_number
from gorgo.proxy.http.body import discard
from gorgo.proxy.http.errors import HttpError, Message, Receive, Send
from gorgo.proxy.http.headers import Header

#: Weights and names are short; more is not an admin call.
MAX_BODY_BYTES = 64 * 1024
#: A reason is a sentence or two, kept with every version.
MAX_TEXT = 1000
#: For a whole body, also of one who has shown no token yet: the listener has few connections, and none to lend.
BODY_S = 10.0

Check = Callable[[object], bool]


class BoundedBodies:
    """An ASGI app whose requests have their bodies in time, and whose answers take what is left of one.

    hypercorn waits for the app to take a body, and the app, as it ends, for hypercorn to note that: an answer that does
    not read its request (401) would have both wait for ever, and the connection count among the few there are.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._limit_s = BODY_S

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _has_body(scope["headers"]):
            await self._app(scope, receive, send)
            return
        end = asyncio.get_running_loop().time() + self._limit_s
        dropping: list[asyncio.Task[NoReturn]] = []

        async def in_time() -> Message:
            try:
                async with asyncio.timeout_at(end):
                    return await receive()
            except TimeoutError:
                message = f"the body was not complete within {self._limit_s:g} s"
                raise HttpError(408, "request_timeout", message) from None

        async def answer(message: Message) -> None:
            if not dropping:
                dropping.append(asyncio.create_task(discard(receive)))
            await send(message)

        try:
            await self._app(scope, in_time, answer)
        except ClientDisconnect:
            return  # It left in the middle of its body: nobody's fault, and nobody to tell.
        finally:
            for task in dropping:
                task.cancel()


def _has_body(headers: Iterable[Header]) -> bool:
    return any(name == b"transfer-encoding" or (name == b"content-length" and value != b"0") for name, value in headers)


async def read_body(request: Request) -> dict[str, Any]:
    """The JSON object of a call; an empty body is an empty object."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise HttpError(413, "request_too_large", f"the body is larger than {MAX_BODY_BYTES} bytes")
    try:
        parsed = json.loads(bytes(body)) if body.strip() else {}
    except (ValueError, RecursionError):
        raise HttpError(400, "invalid_json", "the body is not JSON") from None
    if not isinstance(parsed, dict):
        raise HttpError(400, "invalid_json", "expected a JSON object as the body")
    return parsed


def parse_body(body: Mapping[str, Any], keys: Mapping[str, tuple[Check, str]]) -> None:
    """Check `body` against what each key may hold, and its words; raises `HttpError` for the first that is wrong.

    Null is as if the key were not there.
    """
    for key, value in body.items():
        if key not in keys:
            raise HttpError(400, "invalid_request", f"{key[:60]!r} is unknown here; expected {', '.join(keys)}")
        check, expected = keys[key]
        if value is not None and not check(value):
            raise HttpError(400, "invalid_request", f"{key}: expected {expected}")


def is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_flag(value: object) -> bool:
    return isinstance(value, bool)


def is_text(value: object) -> bool:
    """No half of a surrogate pair either: JSON can say it, and neither a file nor a page could be written with it."""
    return isinstance(value, str) and len(value) <= MAX_TEXT and not any("\ud800" <= c <= "\udfff" for c in value)


def is_weights(value: object) -> bool:
    return isinstance(value, dict) and all(is_number(number) for number in value.values())


def count_of(request: Request, name: str, default: int) -> int:
    """A whole number in the query."""
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise HttpError(400, "invalid_request", f"{name}: expected a whole number")
    return int(text)


def json_response(value: object, status: int = 200) -> Response:
    return Response(json.dumps(value), status, media_type="application/json")
