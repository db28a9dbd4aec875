"""One call of a running proxy's admin listener, and what went wrong with it in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx

from gorgo.cli.failures import FAILED, fail

#: The admin listener answers from memory, or after one write of a small file; this is for a network that does not.
TIMEOUT_S = 10.0


def call_admin(
    method: str, url: str, path: str, token: str | None, body: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The JSON object that comes back; anything else ends the program with exit code 1."""
    address = f"{url.rstrip('/')}{path}"
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    try:
        response = httpx.request(method, address, headers=headers, json=body, timeout=TIMEOUT_S)
        if response.is_error:
            raise fail(f"{address} answered {response.status_code}{_why(response)}", code=FAILED)
        answer = response.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise fail(f"{address}: {error}; is `gorgo serve` running there?", code=FAILED) from error
    if not isinstance(answer, dict):
        raise fail(f"{address} answered something else than a JSON object; is it the admin address?", code=FAILED)
    return answer


def _why(response: httpx.Response) -> str:
    if response.status_code in (401, 403):
        return "; is GORGO_ADMIN_TOKEN right?"
    try:
        return f": {response.json()['error']['message']}"
    except (ValueError, KeyError, TypeError):  # not the proxy's own words
        return "; is it the admin address?"
