"""`gorgo`: the commands under one name; and how a command runs until it is stopped (`run_until_stopped`)."""

from __future__ import annotations

import errno
import gc
import os
import signal
import sys
from collections import UserDict
from collections.abc import Awaitable, Callable
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.main

from gorgo import build_version
from gorgo.cli.errors import FAILED, Commands, add_variables

if TYPE_CHECKING:
    import asyncio

#: Each command's function, or group of commands, below `gorgo.cli`; in the order of `gorgo --help`. One is imported
#: when it is called, and all of them for the help.
_COMMANDS = {
    "serve": "serve:serve",
    "picker": "serve:picker",
    "engine": "engine:engine",
    "replay": "measure.replay:replay",
    "simulate": "measure.simulate:simulate",
    "overload": "measure.simulate:overload",
    "plan": "measure.plan:plan",
    "whatif": "measure.whatif:whatif",
    "demo": "measure.replay:demo",
    "report": "measure.report:report",
    "tune": "tune:tune",
    "tune-offline": "tune:tune_offline",
    "history": "tune:history",
    "learn": "learn:learn",
    "status": "admin.status:status",
    "explain": "admin.explain:explain",
    "drain": "admin.routing:drain",
    "set": "admin.routing:set_weights",
    "policy": "admin.routing:policy",
    "freeze": "admin.routing:freeze",
    "unfreeze": "admin.routing:unfreeze",
    "reload": "admin.routing:reload",
    "check": "check:check",
    "diagnose": "diagnose:diagnose",
    "policies": "policies:policies",
    "scenarios": "measure.simulate:scenarios",
    "profiles": "measure.simulate:profiles",
    "fleets": "measure.simulate:fleets",
    "calibrate": "measure.calibrate:calibrate",
    "rank": "measure.rank:rank",
    "datasets": "measure.datasets:app",
}


#: Commands that make only what stays until their end: the collector would go through it again and again, for a fifth
#: of the start's time. `serve` and `picker` start it once requests can be routed.
_UNCOLLECTED = frozenset({"serve", "picker", "check"})


class _CommandTable(UserDict[str, Any]):
    """The commands by name, each imported when it is asked for."""

    def __getitem__(self, name: str) -> Any:
        if isinstance(self.data[name], str):
            command = _command(name, resolve_name(f"gorgo.cli.{self.data[name]}"))
            add_variables({name: command})
            self.data[name] = command
        return self.data[name]


def _command(name: str, command: Any) -> Any:
    alone = typer.Typer(rich_markup_mode=None)
    if isinstance(command, typer.Typer):
        alone.add_typer(command, name=name)
    else:
        alone.command(name)(command)
    return typer.main.get_group(alone).commands[name]


class _Gorgo(Commands):
    """The group of the table's commands, and of those that are registered with `app`."""

    def __init__(self, *words: Any, **more: Any) -> None:
        super().__init__(*words, **more)
        self.commands = _CommandTable({**_COMMANDS, **self.commands})


app = typer.Typer(
    name="gorgo",
    cls=_Gorgo,
    help="A router for LLM replicas in several regions. Exit codes: 0 ok, 1 failed, 2 bad usage or input.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},  # commands inherit them
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gorgo {build_version()}")
        raise typer.Exit


@app.callback()
def _gorgo(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001 - its callback reads it
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options before the command's name."""
    if context.invoked_subcommand not in _UNCOLLECTED:
        gc.enable()


def main() -> None:
    """Entry point of the `gorgo` command and of `python -m gorgo`."""
    _open_closed_descriptors()
    _prepare_imports()
    try:
        app()
    except SystemExit as end:
        unwritten = _drop_unwritten()
        if unwritten is None or end.code:
            raise
        if unwritten.errno != errno.EPIPE:
            typer.echo(f"gorgo: {unwritten}", err=True)
        raise SystemExit(FAILED) from None
    except OSError:  # stderr cannot be written: commands report all others there
        _drop_unwritten()
        raise SystemExit(FAILED) from None
    finally:
        # A signal during the interpreter's exit must not replace the exit code.
        for late in (signal.SIGTERM, signal.SIGINT):
            signal.signal(late, signal.SIG_IGN)


def run_until_stopped(program: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Run `program` on uvloop where it is installed; SIGTERM and SIGINT set the event that it gets as its argument."""
    import asyncio

    async def run() -> None:
        stop = asyncio.Event()
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signal_number, stop.set)
        await program(stop)

    try:
        import uvloop
    except ImportError:  # it does not build everywhere
        asyncio.run(run())
    else:
        uvloop.run(run())


def _prepare_imports() -> None:
    """Leave out what imports would do for nothing; a third of the time until `gorgo serve` is ready."""
    gc.disable()
    # Matrices of a decision are small, and threads of BLAS only compete for the processors.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Its plugins: pydantic would read the metadata of every installed package to find them.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    # httpx's own command line, which loads rich, pygments and click wherever they are installed.
    sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]


def _drop_unwritten() -> OSError | None:
    """Flush stdout and stderr, and drop what cannot be written; return the first error.

    The interpreter would try again at its exit, and replace the exit code by 120.
    """
    first: OSError | None = None
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            first = first or error
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return first


def _open_closed_descriptors() -> None:
    """Open stdin, stdout and stderr on /dev/null where the caller closed them: another file would take their place."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free descriptor
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
