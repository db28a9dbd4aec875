"""Calls of the admin listener of a running proxy, or of several that are operated as one, with errors as text.

Owns how a call is made and what ends the program. Of several proxies it owns the order, what is printed of several
answers, and the exit code: one proxy without an answer does not keep the others from theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import typer

from gorgo.cli import options
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


# Calls of several proxies.


Answers = dict[str, dict[str, Any]]


def call_each(
    method: str,
    urls: Sequence[str],
    path: str,
    token: str | None,
    body_of: Callable[[Answers], Mapping[str, Any] | None] = lambda _answers: None,
) -> tuple[Answers, list[str]]:
    """Call one proxy after the other; return the answers by address, and the failures.

    `body_of` makes each body from the answers before it.
    """
    answers: Answers = {}
    failures = []
    for url in urls:
        try:
            answers[url] = request_admin(method, url, path, token, body_of(answers))
        except CallError as failure:
            failures.append(str(failure))
    return answers, failures


def end_with(failures: Sequence[str], *, of: int) -> None:
    """Print the failures and end the program with exit code 1, if there are any."""
    for failure in failures:
        typer.echo(f"gorgo: {failure}", err=True)
    if failures and of > 1:
        typer.echo(f"gorgo: {len(failures)} of {of} proxies failed; the command can be repeated", err=True)
    if failures:
        raise typer.Exit(FAILED)


def print_json(answers: Answers, *, of: int) -> None:
    """Print the answer of one proxy, or an object by address of several."""
    with as_expected(", ".join(answers)):
        for shown in answers.values() if of == 1 else [answers] if answers else []:
            options.print_json(shown)


def print_lines(answers: Answers, line_of: Callable[[Mapping[str, Any]], str], *, of: int) -> None:
    """Print a line per answer, with its address if there are several."""
    for url, shown in answers.items():
        with as_expected(url):
            line = line_of(shown)
        typer.echo(line if of == 1 else f"{url}: {line}")


def group_line(answers: Mapping[str, Mapping[str, Any]]) -> str:
    """Return what the routing of several proxies has in common: policy and weights, and the freeze.

    >>> row = {"policy": "gorgo", "weights": {"w_rtt": 0.5}, "frozen": None}
    >>> group_line({"http://a": row, "http://b": row})
    '2 proxies: the same weights, not frozen'
    >>> group_line({"http://a": row, "http://b": row | {"weights": {"w_rtt": 1.0}, "frozen": {"by": None}}})
    '2 proxies: ! other weights at http://b than at http://a, ! frozen at http://b alone'
    """
    first = next(iter(answers))
    routing = {url: (shown["policy"], dict(shown["weights"])) for url, shown in answers.items()}
    other = [url for url in answers if routing[url] != routing[first]]
    frozen = [url for url, shown in answers.items() if shown["frozen"] is not None]
    weights = f"! other weights at {', '.join(other)} than at {first}" if other else "the same weights"
    freeze = "frozen" if len(frozen) == len(answers) else f"! frozen at {', '.join(frozen)} alone"
    return f"{len(answers)} proxies: {weights}, {freeze if frozen else 'not frozen'}"
