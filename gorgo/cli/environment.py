"""Environment variables of options: each option of each command has one, named by the command and the option.

`gorgo tune-offline --max-generations 9` is `GORGO_TUNE_OFFLINE_MAX_GENERATIONS=9`. The command is part of the name, so
that a variable of a container reaches one command alone. An option that several commands share under one variable
names it itself. The command line takes precedence.
"""

from __future__ import annotations

from collections.abc import Mapping

from typer.core import TyperCommand, TyperGroup, TyperOption

PREFIX = "GORGO"


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


def _upper(word: str) -> str:
    return word.upper().replace("-", "_")
