"""Errors as exit codes: 2 for bad usage or input, 1 for what failed; the message on stderr, never a traceback.

An error that is no `GorgoError` and no `OSError` is a fault in GORGO itself and keeps its traceback.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from gorgo.errors import (
    ConfigError,
    GorgoError,
    MissingExtra,
    ReportError,
    ScenarioError,
    TraceError,
    UnknownPolicy,
    UnknownProfile,
    UnknownReplica,
    UnknownScenario,
    WeightsError,
)

FAILED = 1
BAD_INPUT = 2

#: What the person who typed the command can put right by typing another.
_INPUT_ERRORS = (
    ConfigError,
    MissingExtra,
    ReportError,
    ScenarioError,
    TraceError,
    UnknownPolicy,
    UnknownProfile,
    UnknownReplica,
    UnknownScenario,
    WeightsError,
)


class Commands(TyperGroup):
    """The group of all commands; every error passes through here."""

    def make_context(self, *words: Any, **more: Any) -> Any:
        with _told():  # `--help` and `--version` print already
            return super().make_context(*words, **more)

    def invoke(self, ctx: Any) -> Any:
        with _told():
            return super().invoke(ctx)


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except GorgoError as error:
        raise fail(str(error), code=BAD_INPUT if isinstance(error, _INPUT_ERRORS) else FAILED) from error
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise  # the reader of a pipe has left; typer ends quietly
        raise fail(str(error), code=FAILED) from error


def fail(message: str, *, code: int) -> typer.Exit:
    """Says `message` on stderr and returns the exception that ends the program with `code`."""
    typer.echo(f"gorgo: {message}", err=True)
    return typer.Exit(code)
