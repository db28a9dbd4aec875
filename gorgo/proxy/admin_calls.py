"""Reading an admin call's body and answering in JSON.

Owns the bounds and the errors of a body. A key that a route does not know is refused: a misspelt `expected_version`
must not turn a guarded write into one that goes through.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gorgo.proxy.errors import HttpError

#: Weights and names are short; more is not an admin call.
MAX_BODY_BYTES = 64 * 1024
#: A reason is a sentence or two, kept with every version.
MAX_TEXT = 1000
MAX_NUMBER = sys.float_info.max

Check = Callable[[object], bool]


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


def take(body: Mapping[str, Any], keys: Mapping[str, tuple[Check, str]]) -> None:
    """Check `body` against what each key may hold, and its words; raises `HttpError` for the first that is wrong.

    Null is as if the key were not there.
    """
    for key, value in body.items():
        if key not in keys:
            raise HttpError(400, "invalid_request", f"{key[:60]!r} is unknown here; expected {', '.join(keys)}")
        check, expected = keys[key]
        if value is not None and not check(value):
            raise HttpError(400, "invalid_request", f"{key}: expected {expected}")


def is_number(value: object) -> bool:
    """What fits a float; a whole number in JSON may have any number of digits."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER


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
