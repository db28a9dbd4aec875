"""Options of `gorgo tune` and `gorgo history`, and what their words mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer

from gorgo.cli import options

#: As in tuner/history, which is not imported for `--help`.
DATABASE = "sqlite:///gorgo-history.sqlite3"
#: As in tuner/optimizers/registry.py, which is not imported either.
ALGORITHMS = ("es", "cma", "random", "fixed")


def checked_algorithm(name: str) -> str:
    """A name of the registry, or one that another package offers to it."""
    known = [*ALGORITHMS, *(found.name for found in entry_points(group="gorgo.optimizers"))]
    if name not in known:
        raise typer.BadParameter(f"--algorithm {name}: expected one of {', '.join(known)}")
    return name


Database = Annotated[
    str,
    typer.Option(
        envvar="GORGO_DATABASE_URL", metavar="URL", help="The tuner's history: sqlite:///FILE or postgresql://..."
    ),
]
Algorithm = Annotated[str, typer.Option(metavar="NAME", help="Who proposes: es, cma, random or fixed.")]
Mode = Annotated[
    str,
    typer.Option(
        metavar="MODE",
        help="How weight sets are compared: switchback (blocks of minutes, a test) or paper (windows, as published).",
    ),
]
Window = Annotated[int, typer.Option(min=2, help="Samples per window.")]
Hop = Annotated[int, typer.Option(min=1, help="Samples between two looks at a window.")]
BlockS = Annotated[
    float, typer.Option(callback=options.finite, help="Length of a block of one weight set, in seconds.")
]
DiscardS = Annotated[
    float,
    typer.Option(
        callback=options.finite,
        help="First seconds of a block that do not count: they meet the queues of the one before.",
    ),
]
RestBlocks = Annotated[
    float,
    typer.Option(
        callback=options.finite, help="So many blocks the incumbent has all traffic before each pair, unmeasured."
    ),
]
Pairs = Annotated[int, typer.Option(min=1, help="At most so many pairs of blocks per candidate.")]
Alpha = Annotated[
    float, typer.Option(callback=options.finite, help="Probability at most of accepting a candidate that is no better.")
]
WarmUpS = Annotated[
    float, typer.Option(callback=options.finite, help="Seconds before the weights in force are measured.")
]
NoGuard = Annotated[bool, typer.Option("--no-guard", help="Accept a gain in TTFT whatever it does to everything else.")]
TuneLambda = Annotated[bool, typer.Option("--tune-lambda", help="Move weights too that are preferences, as lambda.")]
Widen = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=LO:HI", show_default=False, help="Other bounds for a weight. Repeatable."),
]
StartAt = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=V", show_default=False, help="Begin there instead of at what is in force. Repeatable."),
]
MaxGenerations = Annotated[int, typer.Option(min=1, help="Stop after so many.")]
BudgetS = Annotated[
    float | None, typer.Option(callback=options.finite, help="Stop after so many seconds.", show_default=False)
]
Freeze = Annotated[bool, typer.Option("--freeze", help="Pin what was found when the campaign stops.")]
BeginAnew = Annotated[
    bool, typer.Option("--new", help="Leave an unfinished campaign on that proxy, and begin another.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Measure, say what would be put, and end; nothing is put or written.")
]
PollS = Annotated[
    float, typer.Option(callback=options.finite, min=0.05, max=3600, help="Seconds between two looks at the proxy.")
]
MetricsBind = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT", show_default=False, help="Own Prometheus figures there; port 0 takes a free one."
    ),
]
Trace = Annotated[
    str | None,
    typer.Option(
        metavar="TRACE", show_default=False, help="Tune in virtual time on this trace, data set or shape instead."
    ),
]
RequestLog = Annotated[
    Path | None,
    typer.Option(metavar="FILE", show_default=False, help="The same on what `gorgo serve --request-log` wrote."),
]
Rehearse = Annotated[
    bool,
    typer.Option("--rehearse", help="In virtual time: run the live campaign along the window, not the search."),
]
Policy = Annotated[
    str | None,
    typer.Option(metavar="NAME", show_default=False, help="In virtual time. Default: that of regions.yaml."),
]
Weights = Annotated[
    Path | None, typer.Option(metavar="FILE", show_default=False, help="In virtual time: start from this file's.")
]
Learned = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", show_default=False, help="In virtual time: engines as learned, a saved GET /admin/fleet."
    ),
]
From = Annotated[
    str | None,
    typer.Option("--from", metavar="TIME", show_default=False, help="Window start, as --start of replay."),
]
To = Annotated[str | None, typer.Option("--to", metavar="TIME", show_default=False, help="Window end, not included.")]
Seeds = Annotated[int, typer.Option(min=1, max=100, help="In virtual time: runs per candidate.")]
HeldOutSeeds = Annotated[
    int, typer.Option(min=2, max=1000, help="In virtual time: runs of each finalist, which decide.")
]
WeightsOut = Annotated[
    Path | None,
    typer.Option(metavar="FILE", show_default=False, help="In virtual time: write a weights file, with evidence."),
]
Jobs = Annotated[int | None, typer.Option(min=1, show_default=False, help="Runs at a time. Default: one per core.")]


def start_of(pairs: Sequence[str] | None) -> Mapping[str, float]:
    """Of `--start NAME=V`."""
    return {name: number(text, "--start") for name, text in named(pairs, "--start NAME=V")}


def box_of(pairs: Sequence[str] | None) -> Mapping[str, tuple[float, float]]:
    """Of `--widen NAME=LO:HI`."""
    return {name: bounds(text) for name, text in named(pairs, "--widen NAME=LO:HI")}


def named(pairs: Sequence[str] | None, expected: str) -> list[tuple[str, str]]:
    """`NAME=TEXT` options as pairs."""
    for pair in pairs or []:
        if "=" not in pair:
            raise typer.BadParameter(f"{pair!r}: expected {expected}")
    return [(pair.partition("=")[0], pair.partition("=")[2]) for pair in pairs or []]


def number(text: str, option: str) -> float:
    """Or a usage error."""
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{option}: {text!r} is no number") from None


def bounds(text: str) -> tuple[float, float]:
    """`LO:HI`, or a usage error."""
    low, colon, high = text.partition(":")
    if not colon:
        raise typer.BadParameter(f"--widen: {text!r}: expected LO:HI")
    return number(low, "--widen"), number(high, "--widen")


def host_and_port(bind: str) -> tuple[str, int]:
    """Of `--metrics-bind`, or a usage error."""
    from gorgo.config.addresses import split_bind

    try:
        return split_bind(bind)
    except ValueError as error:
        raise typer.BadParameter(f"--metrics-bind: expected {error}") from error
