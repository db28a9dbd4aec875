"""Errors of the command line as exit codes, and its options as environment variables.

An exit code is 2 for bad usage or input and 1 for failures; the message is on stderr, never a traceback. Any error but
`GorgoError` and `OSError` is a fault of GORGO and keeps its traceback.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from gorgo.errors import GorgoError, InputError

# Environment variables of options: each option of each command has one, named by the command and the option.
#
# `gorgo tune-offline --max-generations 9` is `GORGO_TUNE_OFFLINE_MAX_GENERATIONS=9`. The command is part of the name,
# so that a variable of a container reaches one command alone. An option that several commands share under one variable
# names it itself. The command line takes precedence.


PREFIX = "GORGO"
#: `<name>_PORT` of each service of the namespace in a container of Kubernetes: of `gorgo-engine` it is an option here.
_SERVICE_LINK = re.compile(r"(?:tcp|udp|sctp)://")


def add_variables(commands: Mapping[str, TyperCommand | TyperGroup], prefix: str = PREFIX) -> None:
    """Name the variable of every option of these commands; options that end the program, such as --version, have none.

    >>> from gorgo.cli.app import app
    >>> import typer.main
    >>> serve = typer.main.get_command(app).commands["serve"]
    >>> [option.envvar for option in serve.params if option.name in ("config", "admin_bind")]
    ['GORGO_CONFIG', 'GORGO_SERVE_ADMIN_BIND']
    """
    for name, command in commands.items():
        path = f"{prefix}_{_upper(name)}"
        if isinstance(command, TyperGroup):
            add_variables(command.commands, path)  # type: ignore[arg-type] # typed as any command of click
            continue
        for option in command.params:
            if isinstance(option, TyperOption) and option.envvar is None and not option.is_eager:
                option.envvar = f"{path}_{_upper(option.opts[0].lstrip('-'))}"


def remove_service_links(environ: MutableMapping[str, str]) -> None:
    """Remove the variables that Kubernetes sets for services named as commands are: they are no options.

    >>> environ = {"GORGO_ENGINE_PORT": "tcp://10.0.0.1:80", "GORGO_SERVE_LOG_LEVEL": "info"}
    >>> remove_service_links(environ)
    >>> list(environ)
    ['GORGO_SERVE_LOG_LEVEL']
    """
    for name in [name for name, value in environ.items() if name.startswith(PREFIX) and _SERVICE_LINK.match(value)]:
        if name.endswith("_PORT"):
            del environ[name]


def _upper(word: str) -> str:
    return word.upper().replace("-", "_")


FAILED = 1
BAD_INPUT = 2


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
        raise fail(str(error), code=BAD_INPUT if isinstance(error, InputError) else FAILED) from error
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise  # the reader closed the pipe; typer ends quietly
        raise fail(str(error), code=FAILED) from error


def fail(message: str, *, code: int) -> typer.Exit:
    """Print `message` on stderr and return the exception that ends the program with `code`."""
    typer.echo(f"gorgo: {message}", err=True)
    return typer.Exit(code)
