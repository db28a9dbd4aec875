"""Errors in the form of OpenAI's API: `{"error": {"message", "type", "param", "code"}}`, in a body or in a stream.

On `/v1/messages` they have Anthropic's: `{"type": "error", "error": {"type", "message", "code"}}`.

Owns the form (`HttpError`, `error_json`), and the 404 of a path without a route (`unknown_route`). Leaves the
statuses to those who raise them.

No message repeats what a client sent. That of a failed replica has the engine's own text, which
`live.request.parse.engine_text` has freed of prompts.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from email.utils import formatdate
from math import ceil
from typing import TYPE_CHECKING, Any

from gorgo.core.messages.actions import Reject
from gorgo.errors import closest
from gorgo.live.http.headers import Header

if TYPE_CHECKING:  # a check of the configuration has errors and no routes
    from starlette.routing import BaseRoute, Route

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

#: OpenAI's `type` of an error by status, which its clients turn into exception types.
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


#: Path whose clients know Anthropic's errors, and their `type` by status.
MESSAGES = "/v1/messages"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class HttpError(Exception):
    """An error response to the client."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        headers: Iterable[Header] = (),
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        #: More keys of the error object.
        self.details = details
        self.status = status
        self.code = code
        self.message = message
        self.headers = tuple(headers)


def error_of(reject: Reject) -> HttpError:
    """Return the error of a Router's Reject; `Retry-After` is whole seconds, rounded up."""
    headers: list[Header] = []
    if reject.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % max(1, ceil(reject.retry_after_s))))
    return HttpError(reject.status, reject.code, reject.message, headers=headers)


def error_json(
    status: int, code: str, message: str, details: Mapping[str, Any] | None = None, *, path: str = ""
) -> bytes:
    """Return the body of an error; `path` is the request's.

    >>> error_json(404, "not_found", "no such route")
    b'{"error": {"message": "no such route", "type": "not_found_error", "param": null, "code": "not_found"}}'
    >>> error_json(503, "stopping", "the proxy is stopping", path="/v1/messages")
    b'{"type": "error", "error": {"type": "overloaded_error", "message": "the proxy is stopping", "code": "stopping"}}'
    """
    if path.startswith(MESSAGES):
        kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        described = {"type": kind, "message": message, "code": code, **(details or {})}
        return json.dumps({"type": "error", "error": described}).encode()
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    error = {"message": message, "type": kind, "param": None, "code": code, **(details or {})}
    return json.dumps({"error": error}).encode()


def error_event(status: int, code: str, message: str, *, named: bool = False, path: str = "") -> bytes:
    """Return an error as the last event of a stream. The blank line before it ends an incomplete event.

    `named`: the stream's events have names and types. Anthropic's clients skip an event without, and would take the
    stream for complete.
    """
    error = error_json(status, code, message, path=path)
    if named and path.startswith(MESSAGES):
        return b"\n\nevent: error\ndata: " + error + b"\n\n"
    if named:
        return b'\n\nevent: error\ndata: {"type": "error", ' + error[1:] + b"\n\n"
    return b"\n\ndata: " + error + b"\n\n"


async def send_json(send: Send, status: int, body: bytes, headers: Iterable[Header] = ()) -> None:
    """Send a whole JSON response, with the date that an origin server must send."""
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
                (b"date", formatdate(usegmt=True).encode()),
                *headers,
            ],
        }
    )
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def send_error(send: Send, error: HttpError, headers: Iterable[Header] = (), *, path: str = "") -> None:
    """Send `error`; `headers` come after its own, `path` is the request's."""
    body = error_json(error.status, error.code, error.message, path=path)
    await send_json(send, error.status, body, (*error.headers, *headers))


# The 404 of a path without a route: it names the nearest route and lists all of them.


#: Methods that the framework adds itself.
_IMPLIED = frozenset({"HEAD", "OPTIONS"})


def unknown_route(path: str, routes: Iterable[BaseRoute]) -> HttpError:
    """Return the error for `path`, which it does not repeat.

    A path that ends in a route's path, or has only its end, is most similar to it: a client's base URL is often off by
    `/v1`.
    """
    from starlette.routing import Route

    usable = [route for route in routes if isinstance(route, Route)]
    paths = sorted({route.path.replace(":path}", "}") for route in usable})
    bare = path[:200].rstrip("/")
    near = next((one for one in paths if bare and (one.endswith(bare) or bare.endswith(one))), None)
    hint = closest(bare, paths) if near is None else f" (did you mean {near!r}?)"
    return HttpError(404, "not_found", f"no such route{hint}; there are: {', '.join(map(_shown, usable))}")


def _shown(route: Route) -> str:
    methods = sorted((route.methods or set()) - _IMPLIED)
    path = route.path.replace(":path}", "}")
    return f"{'/'.join(methods)} {path}" if methods else path
