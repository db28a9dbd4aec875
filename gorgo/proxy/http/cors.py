"""CORS for browsers: answers to preflight requests, and the headers of all other responses.

Preflights are Starlette's. Its `send` is not used: it is a coroutine per event, and a wrapped `send` would turn off
the direct writes of a stream.
"""

from __future__ import annotations

from collections.abc import Awaitable

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Router

from gorgo.config.model import CorsConfig
from gorgo.live.http.body import draining
from gorgo.live.http.errors import Message, Receive, Send
from gorgo.live.http.headers import Header, find

#: Headers that scripts may read beside those that browsers always show.
EXPOSED = (
    *("retry-after", "x-request-id", "x-gorgo-replica", "x-gorgo-region", "x-gorgo-policy"),
    *("x-gorgo-weights-version", "x-gorgo-predicted-ttft-ms", "x-gorgo-estimated-cached-tokens"),
)
#: A browser repeats a preflight after this; Chromium allows two hours at most.
MAX_AGE_S = 600


class CorsSend:
    """An ASGI `send` that adds headers to the head of a response. It is no coroutine and changes no body."""

    __slots__ = ("_headers", "wrapped")

    def __init__(self, wrapped: Send, headers: list[Header]) -> None:
        self.wrapped = wrapped
        self._headers = headers

    def __call__(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *self._headers]}
        return self.wrapped(message)


class Cors:
    """The rules of one configuration."""

    def __init__(self, config: CorsConfig) -> None:
        self.config = config
        self._starlette = CORSMiddleware(
            Router(),  # never called: other requests pass by
            allow_origins=config.allow_origins,
            allow_methods=("GET", "POST"),
            # A browser asks for what a client library sets; no cookie is involved.
            allow_headers=("*",),
            max_age=MAX_AGE_S,
        )
        self._exposed = (b"access-control-expose-headers", ", ".join(EXPOSED).encode())

    async def preflight(self, scope: Message, receive: Receive, send: Send) -> bool:
        """Answer a preflight request, which has no key; return whether it was one."""
        headers = Headers(scope=scope)
        if scope["method"] != "OPTIONS" or not {"origin", "access-control-request-method"} <= set(headers.keys()):
            return False
        response = self._starlette.preflight_response(headers)
        async with draining(receive):
            await response(scope, receive, send)
        return True

    def wrap(self, scope: Message, send: Send) -> Send:
        """Return a `send` with the headers for the request's origin."""
        origin = find(scope["headers"], b"origin")
        if self._starlette.allow_all_origins:
            return send if origin is None else CorsSend(send, [(b"access-control-allow-origin", b"*"), self._exposed])
        # For caches: another origin gets another answer.
        headers: list[Header] = [(b"vary", b"Origin")]
        if origin is not None and self._starlette.is_allowed_origin(origin.decode("latin-1")):
            headers += [(b"access-control-allow-origin", origin), self._exposed]
        return CorsSend(send, headers)
