"""Errors as exit codes: 2 for bad usage or input, 1 for failures; the message on stderr, never a traceback.

Any error but `GorgoError` and `OSError` is a fault of GORGO and keeps its traceback.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from gorgo.cli.environment import remove_service_links
from gorgo.errors import (
    ConfigError,
    GorgoError,
    MissingExtra,
    ReportError,
    ScenarioError,
    TraceError,
    UnknownFleet,
    UnknownPolicy,
    UnknownProfile,
    UnknownReplica,
    UnknownScenario,
    WeightsError,
)

FAILED = 1
BAD_INPUT = 2

#: Errors that another command line or file avoids.
_INPUT_ERRORS = (
    ConfigError,
    MissingExtra,
    ReportError,
    ScenarioError,
    TraceError,
    UnknownFleet,
    UnknownPolicy,
    UnknownProfile,
    UnknownReplica,
    UnknownScenario,
    WeightsError,
)


class Commands(TyperGroup):
    """The group of all commands: its errors become exit codes."""

    def make_context(self, *words: Any, **more: Any) -> Any:
        remove_service_links(os.environ)
        with _errors_as_exit_codes():  # `--help` and `--version` print already
            return super().make_context(*words, **more)

    def invoke(self, ctx: Any) -> Any:
        with _errors_as_exit_codes():
            return super().invoke(ctx)


@contextmanager
def _errors_as_exit_codes() -> Iterator[None]:
    try:
        yield
    except GorgoError as error:
        raise fail(str(error), code=BAD_INPUT if isinstance(error, _INPUT_ERRORS) else FAILED) from error
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise  # the reader closed the pipe; typer ends quietly
        raise fail(str(error), code=FAILED) from error


def fail(message: str, *, code: int) -> typer.Exit:
    """Print `message` on stderr and return the exception that ends the program with `code`."""
    typer.echo(f"gorgo: {message}", err=True)
    return typer.Exit(code)
