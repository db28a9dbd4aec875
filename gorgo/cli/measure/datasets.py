"""`gorgo datasets`: shipped, generated and fetched traces, and their contents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gorgo.cli import options
from gorgo.cli.tables import table

if TYPE_CHECKING:
    from gorgo.lab.datasets import TraceStats
    from gorgo.lab.datasets.published import OnProgress

app = typer.Typer(help="List, describe, generate, convert and fetch traces.", no_args_is_help=True)

OWN_LICENCE = "Apache-2.0"

#: Rows of `describe`: title, field and format.
STATS = (
    ("requests", "requests", "{:,}"),
    ("seconds", "duration_s", "{:,.0f}"),
    ("requests per second", "requests_per_s", "{:.2f}"),
    ("distinct users", "users", "{:,}"),
    ("requests per user", "requests_per_user", "{:.1f}"),
    ("mean turns", "turns_mean", "{:.1f}"),
    ("multi-turn requests", "multi_turn_share", "{:.1%}"),
    ("input tokens, median", "input_p50", "{:,.0f}"),
    ("input tokens, mean", "input_mean", "{:,.0f}"),
    ("input tokens, p95", "input_p95", "{:,.0f}"),
    ("output tokens, mean", "output_mean", "{:,.0f}"),
    ("block reuse, global", "block_reuse", "{:.1%}"),
    ("block reuse, intra-user", "user_block_reuse", "{:.1%}"),
)


@app.command("list")
def list_datasets(as_json: options.Json = False) -> None:
    """List shipped, generated and fetchable traces with their licences."""
    listed = list(_listed())
    if as_json:
        options.print_json(listed)
    else:
        header = ["name", "is", "licence", "where"]
        typer.echo(table(header, [[one["name"], one["kind"], one["licence"], _where(one)] for one in listed]))


@app.command()
def describe(
    traces: Annotated[list[str], typer.Argument(help="Traces, request logs, shapes, or names of shipped ones.")],
    max_input: options.MaxInput = None,
    max_output: options.MaxOutput = None,
    start: options.Start = None,
    end: options.End = None,
    block_tokens: options.BlockTokens = None,
    as_json: options.Json = False,
) -> None:
    """Describe traces side by side.

    Requests, users, turns, lengths, and the ratio of blocks that an ideal cache reuses. Unknown is `-`.
    """
    from gorgo.lab.datasets import describe_trace, load_requests, own_block_tokens, unit_warning
    from gorgo.lab.request_log import skipped_lines

    filters = options.trace_filters(max_input=max_input, max_output=max_output, start=start, end=end)
    stats_by_trace = {
        trace: describe_trace(load_requests(trace, filters, block_tokens=block_tokens or own_block_tokens(trace)))
        for trace in traces
    }
    for trace, one in stats_by_trace.items():
        for warning in filter(None, (skipped_lines(Path(trace)), unit_warning(trace, one.requests, one.duration_s))):
            typer.echo(f"gorgo: {warning}", err=True)
    if as_json:
        options.print_json([{"trace": trace, **_finite(asdict(stats))} for trace, stats in stats_by_trace.items()])
    else:
        typer.echo(_side_by_side(stats_by_trace))


@app.command()
def generate(
    shape: Annotated[
        str, typer.Argument(help="TOML file with the parameters of the generator, or the name of a shipped shape.")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="File to write; `.gz` compresses it.")],
    seed: Annotated[
        int | None, typer.Option(min=0, show_default=False, help="Seed in place of the one in the file.")
    ] = None,
) -> None:
    """Generate a trace from a shape.

    The same shape and seed give the same bytes on every machine.
    """
    from gorgo.lab.datasets import read_shape, shapes, write_trace

    wanted = read_shape(shapes().get(shape, Path(shape)))
    write_trace(wanted if seed is None else replace(wanted, seed=seed), out)
    typer.echo(str(out))


@app.command()
def convert(
    form: Annotated[str, typer.Argument(help="azure, burstgpt, csv, bailian, sharegpt or lmsys.")],
    file: Annotated[Path, typer.Argument(help="File of that form; `.gz` is unpacked.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="File to write; `.gz` compresses it.")],
    think: Annotated[
        float, typer.Option(min=0, callback=options.finite, help="Mean think time, s, where a trace has no times.")
    ] = 30.0,
    seed: options.Seed = 0,
) -> None:
    """Convert a published trace of another form, or a CSV of your own.

    Times and lengths are the trace's. A trace without texts shares no blocks; of texts the hashes are written alone.
    Where there are no times, a conversation begins every second on average; `--load` of a run scales all times.
    """
    from gorgo.lab.datasets.published import Timing, convert

    done = convert(file, out, form=form, timing=Timing(think_s=think, seed=seed))
    if done.left_out:
        typer.echo(f"gorgo: {done.left_out:,} requests failed, are empty or lack blocks, and are left out", err=True)
    typer.echo(str(out))


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="Name in `gorgo datasets list`.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the file.")] = Path("."),
    url: Annotated[str | None, typer.Option(show_default=False, help="URL of a mirror to fetch from.")] = None,
) -> None:
    """Fetch a published trace.

    The file appears when it is complete and its sha256, where known, is correct. An existing file is never overwritten.
    """
    from gorgo.lab.datasets import remote_dataset
    from gorgo.lab.datasets.published import fetch as fetch_dataset
    from gorgo.lab.termination import termination_as_interrupt

    wanted = remote_dataset(name)
    with termination_as_interrupt(), _progress(wanted.file) as on_progress:
        fetched = fetch_dataset(wanted, out, url=url, on_progress=on_progress)
    checked = "verified" if fetched.checked else "not verified: none is published"
    typer.echo(f"{wanted.name}: {wanted.licence}; sha256 {fetched.sha256} ({checked})", err=True)
    if not fetched.fresh:
        typer.echo("the file existed already", err=True)
    typer.echo(str(fetched.path))


def _listed() -> Iterator[dict[str, str | None]]:
    from gorgo.lab.datasets import datasets, remote_datasets, shapes

    shipped = {one.name: str(one.path) for one in datasets()}
    for name, shape in shapes().items():
        kind = "shipped" if name in shipped else "generated"
        yield {
            "name": name,
            "kind": kind,
            "licence": OWN_LICENCE,
            "path": shipped.get(name),
            "shape": str(shape),
            "url": None,
        }
    for one in remote_datasets():
        yield {
            "name": one.name,
            "kind": "to fetch",
            "licence": one.licence,
            "path": None,
            "shape": None,
            "url": one.url,
        }


def _where(one: dict[str, str | None]) -> str | None:
    return one["path"] or one["shape"] or one["url"]


def _side_by_side(stats_by_trace: dict[str, TraceStats]) -> str:
    columns = [[_name(trace), *_shown(stats)] for trace, stats in stats_by_trace.items()]
    widths = [max(len(cell) for cell in column) for column in columns]
    padded = [[cell.rjust(width) for cell in column] for column, width in zip(columns, widths, strict=True)]
    rows = [list(cells) for cells in zip(["", *(title for title, _, _ in STATS)], *padded, strict=True)]
    return table(rows[0], rows[1:])


def _name(trace: str) -> str:
    return Path(trace).name


def _shown(stats: TraceStats) -> Sequence[str]:
    values = _finite(asdict(stats))
    return ["-" if values[name] is None else form.format(values[name]) for _, name, form in STATS]


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with None for NaN: a trace of one moment has no rate."""
    return {name: None if isinstance(value, float) and not isfinite(value) else value for name, value in values.items()}


@contextmanager
def _progress(file: str) -> Iterator[OnProgress]:
    """Show a bar on stderr, if it is a terminal."""
    from rich.progress import BarColumn, DownloadColumn, TransferSpeedColumn

    from gorgo.lab.progress import progress_display

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with progress_display(file, None, *columns, transient=True) as display:
        yield lambda done, total: display.update(done, total=total)
