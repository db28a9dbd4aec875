"""A command line of gorgo's, read by the command line itself: words that it would refuse are refused here.

Owns nothing of what the command then does; nothing is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer.main

from gorgo.cli import app


def parsed(words: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """The command that these words after `gorgo` name, and every parameter's value.

    Raises whatever typer raises at a command, an option, a value or a missing argument that is none.
    """
    command: Any = typer.main.get_command(app)
    rest, path = list(words), []
    while hasattr(command, "resolve_command"):
        with command.make_context("gorgo", rest) as context:
            name, command, rest = command.resolve_command(context, rest)
        path.append(name)
    with command.make_context(" ".join(path), rest) as context:
        return " ".join(path), dict(context.params)
