"""One call of the admin listener of a running proxy, with its errors as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx

from gorgo.cli.errors import FAILED, fail

#: The admin listener answers from memory, or after one write of a small file; this is for a network that does not.
TIMEOUT_S = 10.0


class CallError(Exception):
    """No answer or an unexpected one; the message is for the terminal."""


def call_admin(
    method: str, url: str, path: str, token: str | None, body: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the JSON object of the answer; anything else ends the program with exit code 1."""
    try:
        return request_admin(method, url, path, token, body)
    except CallError as failure:
        raise fail(str(failure), code=FAILED) from failure


@contextmanager
def as_expected(url: str) -> Iterator[None]:
    """End the program with exit code 1 if an answer lacks what the block reads from it.

    Such an answer comes from another program or another version.
    """
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        what = f"{type(error).__name__}: {error}"
        message = f"{url}: unexpected answer ({what}); is it the admin address of a proxy of this version?"
        raise fail(message, code=FAILED) from error


def request_admin(
    method: str, url: str, path: str, token: str | None, body: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the JSON object of the answer. Raises `CallError`."""
    address = f"{url.rstrip('/')}{path}"
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    try:
        response = httpx.request(method, address, headers=headers, json=body, timeout=TIMEOUT_S)
        if response.is_error:
            raise CallError(f"{address} answered {response.status_code}{_why(response)}")
        answer = response.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, RecursionError) as error:
        raise CallError(f"{address}: {error}; is `gorgo serve` running there?") from error
    if not isinstance(answer, dict):
        raise CallError(f"{address} answered no JSON object; is it the admin address?")
    return answer


def _why(response: httpx.Response) -> str:
    if response.status_code in (401, 403):
        return "; is GORGO_ADMIN_TOKEN right?"
    try:
        return f": {response.json()['error']['message']}"
    except (ValueError, KeyError, TypeError):  # not an error of the proxy
        return "; is it the admin address?"
