"""`gorgo plan`: its arguments, and the tables that it prints. Leaves the search to `gorgo.lab.plan`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gorgo.cli import options
from gorgo.cli.tables import Cell, table
from gorgo.formatting import counted

if TYPE_CHECKING:
    from gorgo.lab.plan import Plan, PlanSettings
    from gorgo.lab.plan.search import Measured


def plan(
    trace: options.Trace,
    settings: Annotated[
        Path,
        typer.Option(metavar="FILE", help="YAML with accelerators, prices, quotas, round trips, clients, objective."),
    ],
    growth: Annotated[
        float, typer.Option(min=0.01, callback=options.finite, help="Load to plan for, relative to the trace's own.")
    ] = 1.0,
    shift: Annotated[
        list[str] | None,
        typer.Option(
            metavar="REGION=HOURS",
            show_default=False,
            help="The day of a region's clients begins so much later; repeatable, instead of shift_h in the file.",
        ),
    ] = None,
    fleets: Annotated[int, typer.Option(min=1, max=100, help="Cheapest fleets to find.")] = 3,
    seeds: Annotated[int, typer.Option(min=1, max=20, help="Runs in whose mean a fleet has to serve.")] = 3,
    most: Annotated[int, typer.Option(min=1, help="Fleets to simulate at most.")] = 400,
    limit: options.Limit = None,
    max_input: options.MaxInput = None,
    max_output: options.MaxOutput = None,
    spread: options.Spread = 0.0,
    start: options.Start = None,
    end: options.End = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            show_default=False,
            help="Write plan.json, a plot, and regions.yaml and terraform variables of the cheapest fleet there.",
        ),
    ] = None,
    jobs: options.Jobs = None,
    as_json: options.Json = False,
) -> None:
    """Find the cheapest fleets that serve a demand within objectives.

    Fleets are tried in order of their price: lower bounds of work, KV pool and distance first, then a simulation of
    the whole demand under the router of `gorgo serve`. Of the cheapest fleet it is also said how much more load it
    serves, what one replica less or a lost region does, and what a fleet of its own in each region would cost.
    """
    from gorgo.lab.plan import PlanOptions, make_plan, read_settings, write_plan
    from gorgo.lab.progress import shown_progress

    wanted = PlanOptions(
        trace=str(options.trace_path(trace)),
        settings=_shifted(read_settings(settings), shift or ()),
        filters=options.trace_filters(
            limit=limit, max_input=max_input, max_output=max_output, spread=spread, start=start, end=end
        ),
        growth=growth,
        fleets=fleets,
        seeds=seeds,
        most=most,
        n_jobs=-1 if jobs is None else jobs,
    )
    with shown_progress("plan: fleets simulated") as advance:
        result = make_plan(wanted, advance=advance)
    if out is not None:
        for path in write_plan(out, result, wanted.settings):
            typer.echo(f"gorgo: wrote {path}", err=True)
        _plot(out / "plan.svg", result)
    if as_json:
        options.print_json(result.as_json())
    else:
        for line in _lines(result):
            typer.echo(line)
    if result.chosen is None:
        raise typer.Exit(1)


def _shifted(settings: PlanSettings, shifts: Sequence[str]) -> PlanSettings:
    """Return the settings with the shifts of the command line, or raise a usage error."""
    from dataclasses import replace

    wanted: dict[str, float] = {}
    for text in shifts:
        region, _, hours = text.partition("=")
        try:
            wanted[region] = float(hours)
        except ValueError:
            raise typer.BadParameter(f"--shift {text}: expected REGION=HOURS, as ap-seoul=8") from None
        if not isfinite(wanted[region]):
            raise typer.BadParameter(f"--shift {text}: expected a finite number of hours")
    regions = [one.region for one in settings.clients]
    for region in wanted:
        if region not in regions:
            raise typer.BadParameter(f"--shift {region}: no such clients; there are: {', '.join(regions) or 'none'}")
    moved = [replace(one, shift_h=wanted.get(one.region, one.shift_h)) for one in settings.clients]
    return replace(settings, clients=tuple(moved))


def _plot(path: Path, result: Plan) -> None:
    """Write the plot, or say what it lacks: the tables need no extra."""
    from gorgo.errors import MissingExtra
    from gorgo.lab.plan.plan import write_plan_plot

    try:
        write_plan_plot(path, result)
    except MissingExtra as error:
        typer.echo(f"gorgo: {error}", err=True)
    else:
        typer.echo(f"gorgo: wrote {path}", err=True)


def _lines(result: Plan) -> Iterator[str]:
    from gorgo.lab.plan.plan import HEADROOM_MAX, fleet_text

    demand, chosen, simulated = result.demand, result.chosen, result.found
    regions = [group.region for group in demand.groups]
    yield (
        f"{counted(len(demand.feed), 'request')} of the clients of {counted(len(regions), 'region')} "
        f"in {demand.span_s / 3600:.2f} h, simulated"
    )
    yield (
        f"{counted(len(simulated.measured), 'fleet')} simulated, {simulated.excluded:,} excluded by lower bounds, "
        f"{simulated.dominated:,} smaller than one that failed"
    )
    if not simulated.is_complete:
        yield "The search ended before every cheaper fleet was tried: there may be one. A larger --most goes on."
    if chosen is None:
        yield "No fleet within the quotas serves the demand. The nearest:"
        yield ""
        nearest = sorted(simulated.measured, key=lambda one: -one.margin)[:3]
        yield _table(result, [(fleet_text(result.kinds, one.counts), one) for one in nearest])
        return
    yield ""
    yield _table(result, [(fleet_text(result.kinds, one.counts), one) for one in simulated.serving])
    yield ""
    yield f"The first of them, {fleet_text(result.kinds, chosen.counts)}:"
    for region, wanted, interval in zip(regions, chosen.objective, result.intervals, strict=True):
        reach = f", 95 % interval {interval[1]:.1%} to {interval[2]:.1%}" if len(interval) > 1 else ""
        yield f"  {region}: {interval[0]:.1%} in the mean of the demand's windows{reach}; {wanted:.0%} is wanted"
    headroom = result.headroom or 1.0
    more = "at least " if headroom >= HEADROOM_MAX else ""
    yield f"  headroom: it serves {more}{headroom:.2f} times the demand"
    if result.static_peak is not None:
        yield (
            f"  a fleet in each region for its own clients costs {result.static_peak:.2f} an hour: "
            f"this one {chosen.cost / result.static_peak:.0%} of it"
        )
    yield ""
    yield "With less:"
    yield ""
    yield _table(result, [(one.without, one.measured) for one in result.losses], first="without")


def _table(result: Plan, rows: Sequence[tuple[str, Measured | None]], *, first: str = "fleet") -> str:
    groups = result.demand.groups
    header = [first, "cost/h", "egress/h"]
    for group in groups:
        assert group.objective is not None, "the settings have given each group one"
        header += [f"{group.region} %", f"TTFT ms p{group.objective.share * 100:g}"]
    body: list[list[Cell]] = []
    for words, one in rows:
        if one is None:
            body.append([words, "0.00", "0.00", *["0.0", "-"] * len(groups)])
            continue
        row: list[Cell] = [words, f"{one.cost:.2f}", f"{one.egress:.2f}"]
        for share, quantiles in zip(one.attained, one.quantiles, strict=True):
            row += [f"{share * 100:.1f}", "-" if quantiles[0] is None else f"{quantiles[0]:.0f}"]
        body.append(row)
    return table(header, body)
