"""`gorgo`: the commands under one name."""

from __future__ import annotations

import errno
import os
import signal
import sys
from typing import Annotated

import typer

from gorgo import __version__
from gorgo.cli.admin.drain import drain
from gorgo.cli.admin.explain import explain
from gorgo.cli.admin.freeze import freeze, unfreeze
from gorgo.cli.admin.reload import reload
from gorgo.cli.admin.routing import policy, set_weights
from gorgo.cli.admin.status import status
from gorgo.cli.check import check
from gorgo.cli.engine import engine
from gorgo.cli.errors import FAILED, Commands
from gorgo.cli.measure import datasets
from gorgo.cli.measure.calibrate import calibrate
from gorgo.cli.measure.demo import demo
from gorgo.cli.measure.overload import overload
from gorgo.cli.measure.rank import rank
from gorgo.cli.measure.replay import replay
from gorgo.cli.measure.report import report
from gorgo.cli.measure.simulate import simulate
from gorgo.cli.measure.simulated import fleets, profiles, scenarios
from gorgo.cli.picker import picker
from gorgo.cli.policies import policies
from gorgo.cli.serve import serve
from gorgo.cli.tune.history import history
from gorgo.cli.tune.learn import learn
from gorgo.cli.tune.tune import tune
from gorgo.cli.tune.tune_offline import tune_offline

app = typer.Typer(
    name="gorgo",
    cls=Commands,
    help="A router for LLM replicas in several regions. Exit codes: 0 ok, 1 failed, 2 bad usage or input.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for _command in (
    *(serve, picker, engine, replay, simulate, overload, demo, report),
    *(tune, tune_offline, history, learn, status, explain, drain, set_weights, policy, freeze, unfreeze, reload, check),
    *(policies, scenarios, profiles, fleets, calibrate, rank),
):
    app.command("set" if _command is set_weights else None)(_command)
app.add_typer(datasets.app, name="datasets")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gorgo {__version__}")
        raise typer.Exit


@app.callback()
def _gorgo(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options before the command's name."""


def main() -> None:
    """Entry point of the `gorgo` command and of `python -m gorgo`."""
    _open_closed_descriptors()
    # Before numpy is imported: matrices of a decision are small, and threads of BLAS only compete for the processors.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
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
