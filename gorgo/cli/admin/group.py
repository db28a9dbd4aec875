"""One call of the admin listeners of several proxies that are operated as one.

Owns the order, what is printed of several answers, and the exit code: one proxy without an answer does not keep the
others from theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import typer

from gorgo.cli import options
from gorgo.cli.admin.call import CallError, as_expected, request_admin
from gorgo.cli.errors import FAILED

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
