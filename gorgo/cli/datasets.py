"""`gorgo datasets`: the traces that come along, what is in a trace, and the generator that makes them."""

from __future__ import annotations

from dataclasses import asdict, replace
from math import isfinite
from pathlib import Path
from typing import Annotated, Any

import typer

from gorgo.cli import options
from gorgo.cli.tables import table

app = typer.Typer(help="List, describe and generate traces.", no_args_is_help=True)


@app.command("list")
def list_datasets(as_json: options.Json = False) -> None:
    """List the traces that come with GORGO."""
    from gorgo.apps.datasets import datasets

    found = datasets()
    if as_json:
        options.print_json([{"name": one.name, "path": str(one.path), "shape": str(one.shape)} for one in found])
    else:
        typer.echo(table(["name", "path"], [[one.name, str(one.path)] for one in found]))


@app.command()
def describe(trace: options.Trace, as_json: options.Json = False) -> None:
    """Show what is in a trace.

    Requests, their lengths, and the share of blocks that an ideal cache could reuse.
    """
    from gorgo.apps.datasets import describe_trace
    from gorgo.apps.traces import TraceFilters, load_trace

    requests = load_trace(options.trace_path(trace), TraceFilters())
    figures = {name: _finite(value) for name, value in asdict(describe_trace(requests)).items()}
    if as_json:
        options.print_json({"trace": trace, **figures})
    else:
        typer.echo(table(["figure", "value"], [[name, _shown(value)] for name, value in figures.items()]))


@app.command()
def generate(
    shape: Annotated[str, typer.Argument(help="TOML file with the generator's parameters, or a shipped trace's name.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the trace goes; `.gz` compresses it.")],
    seed: Annotated[
        int | None, typer.Option(min=0, show_default=False, help="Instead of the one in the shape.")
    ] = None,
) -> None:
    """Make a trace of a given shape.

    The same shape and seed give the same bytes everywhere.
    """
    from gorgo.apps.datasets import datasets, read_shape, write_trace

    shipped = {one.name: one.shape for one in datasets()}
    wanted = read_shape(shipped.get(shape, Path(shape)))
    write_trace(wanted if seed is None else replace(wanted, seed=seed), out)
    typer.echo(str(out))


def _finite(value: Any) -> Any:
    """JSON has no NaN: a trace of one moment has no rate."""
    return None if isinstance(value, float) and not isfinite(value) else value


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:,.3g}" if abs(value) < 100 else f"{value:,.0f}"
