"""What every admin call is checked for: its token, and its body in JSON.

Every body is bounded in size and time, also where no route reads it. An unknown key is an error: a misspelt
`expected_version` must not turn a guarded write into an unguarded one.

Theory of operation of the token's check. It takes constant time, and the right token always passes at once, so guessing
locks no operator out. After a few wrong ones within a minute each further one is answered late. Only a few answers
wait, so they do not use up the connections, and the connection of a further one ends without an answer.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from gorgo.core.numeric import is_number
from gorgo.live.event_loop import Clock
from gorgo.live.http.body import discard
from gorgo.live.http.errors import HttpError, Message, Receive, Send
from gorgo.live.http.headers import has_body
from gorgo.live.logs import log
from gorgo.live.parsing.json_body import not_json

#: Weights and names are short.
MAX_BODY_BYTES = 64 * 1024
#: A reason is a sentence or two, stored with every version.
MAX_TEXT = 1000
#: Deadline of a body, also without a token: the listener has few connections.
BODY_S = 10.0

Check = Callable[[object], bool]


class BoundedBodies:
    """An ASGI app with a deadline for bodies. It discards the rest of a body that the response did not read.

    Without that, the connection would not notice during a response that its client disconnected.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._limit_s = BODY_S

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not has_body(scope["headers"]):
            await self._app(scope, receive, send)
            return
        end = asyncio.get_running_loop().time() + self._limit_s
        discarding: list[asyncio.Task[None]] = []

        async def in_time() -> Message:
            try:
                async with asyncio.timeout_at(end):
                    return await receive()
            except TimeoutError:
                message = f"the body was not complete within {self._limit_s:g} s"
                raise HttpError(408, "request_timeout", message) from None

        async def answer(message: Message) -> None:
            if not discarding:
                discarding.append(asyncio.create_task(discard(receive)))
            await send(message)

        try:
            await self._app(scope, in_time, answer)
        except ClientDisconnect:
            return  # The client disconnected: no response is possible.
        finally:
            for task in discarding:
                task.cancel()


async def read_body(request: Request) -> dict[str, Any]:
    """Return the JSON object of a call; an empty body is an empty object."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise HttpError(413, "request_too_large", f"the body is larger than {MAX_BODY_BYTES} bytes")
    try:
        parsed = json.loads(bytes(body)) if body.strip() else {}
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise not_json(bytes(body), error) from None
    except (ValueError, RecursionError):
        message = "the body is not JSON: a number is too long, or the nesting too deep"
        raise HttpError(400, "invalid_json", message) from None
    if not isinstance(parsed, dict):
        raise HttpError(400, "invalid_json", "expected a JSON object as the body")
    return parsed


def parse_body(body: Mapping[str, Any], keys: Mapping[str, tuple[Check, str]]) -> None:
    """Check `body` by the check of each key. Raises `HttpError` for the first wrong key. Null is as a missing key."""
    for key, value in body.items():
        if key not in keys:
            raise HttpError(400, "invalid_request", f"{key[:60]!r}: unknown key; expected {', '.join(keys) or 'none'}")
        check, expected = keys[key]
        if value is not None and not check(value):
            raise HttpError(400, "invalid_request", f"{key}: expected {expected}")


def is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_flag(value: object) -> bool:
    return isinstance(value, bool)


def is_text(value: object) -> bool:
    """Return whether `value` is short text without lone surrogates, which no file or page can encode."""
    return isinstance(value, str) and len(value) <= MAX_TEXT and not any("\ud800" <= c <= "\udfff" for c in value)


def is_weights(value: object) -> bool:
    return isinstance(value, dict) and all(is_number(number) for number in value.values())


def count_of(request: Request, name: str, default: int) -> int:
    """Return a whole number of the query."""
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise HttpError(400, "invalid_request", f"{name}: expected a whole number")
    return int(text)


def json_response(value: object, status: int = 200) -> Response:
    return Response(json.dumps(value), status, media_type="application/json")


#: Wrong tokens within `WINDOW_S` that are answered at once: a mistyped one, a script with an old one.
FREE = 10
WINDOW_S = 60.0
DELAY_S = 1.0
#: Answers that wait at once; far fewer than the listener's connections.
WAITING = 32
#: Between two lines in the log.
LOG_S = 10.0


class NoAnswer(Exception):  # noqa: N818 - not an error of the program
    """A wrong token beyond those whose answers wait: the connection ends without an answer."""


#: Header of a 401.
CHALLENGE = ((b"www-authenticate", b"Bearer"),)


def bearer(headers: Mapping[str, str]) -> bytes | None:
    """Return the token of a request; empty for another scheme, `None` without one."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if not scheme:
        return None
    return given.strip().encode() if scheme.lower() == "bearer" else b""


class TokenCheck:
    """The admin token, and the wrong ones of the last minute.

    Parameters
    ----------
    token:
        The token; None rejects every request.
    clock:
        Monotonic seconds.
    count:
        Called once per wrong token.
    """

    def __init__(self, token: str | None, clock: Clock, count: Callable[[], None]) -> None:
        self.token = None if token is None else token.encode()
        self._clock = clock
        self._count = count
        self._wrong: deque[float] = deque(maxlen=FREE + 1)
        self._waiting = 0
        self._logged_s = float("-inf")
        self._unlogged = 0

    def is_right(self, given: bytes) -> bool:
        """Return whether `given` is the token."""
        return self.token is not None and hmac.compare_digest(given, self.token)

    def delay_s(self) -> float | None:
        """Record a wrong token; return how long its answer has to wait, and None for one that gets no answer."""
        now = self._clock()
        self._count()
        self._wrong.append(now)
        self._unlogged += 1
        if now - self._logged_s >= LOG_S:
            log("admin_refused", level=logging.WARNING, wrong_tokens=self._unlogged)
            self._logged_s, self._unlogged = now, 0
        late = len(self._wrong) > FREE and now - self._wrong[0] < WINDOW_S
        if not late:
            return 0.0
        return DELAY_S if self._waiting < WAITING else None

    async def refuse(self) -> None:
        """Record a wrong token, and return when it may be answered.

        Raises `NoAnswer` where too many answers wait: the connection is to end at once.
        """
        delay_s = self.delay_s()
        if delay_s is None:
            raise NoAnswer
        if delay_s:
            self._waiting += 1
            try:
                await asyncio.sleep(delay_s)
            finally:
                self._waiting -= 1
