"""The command that looks for a fleet's capacity and goes beyond it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from gorgo.cli import options

if TYPE_CHECKING:
    from gorgo.apps.simulate.overload import OverloadRow


def overload(
    trace: options.Trace,
    policy: Annotated[str, typer.Option(metavar="NAME", help="One that predicts.")] = "gorgo-ms",
    slo_ttft_ms: Annotated[
        float, typer.Option(min=1, callback=options.finite, help="Deadline of every request's first token.")
    ] = 2000.0,
    slo_e2e_ms: Annotated[
        float, typer.Option(min=1, callback=options.finite, help="When every last token should be there.")
    ] = 10_000.0,
    max_concurrency_per_replica: Annotated[
        int | None,
        typer.Option(min=1, show_default=False, help="Send no more to a replica with so many. Default: as configured."),
    ] = None,
    load: Annotated[
        list[float] | None,
        typer.Option(
            min=0.01,
            callback=options.finite,
            show_default=False,
            help="Multiple of capacity; repeatable. Default: 0.7, 1, 1.3, 3.",
        ),
    ] = None,
    scenario: Annotated[str, typer.Option(metavar="NAME", help="What goes wrong, or is different.")] = "steady",
    config: options.Config = options.REGIONS_YAML,
    limit: options.Limit = None,
    max_input: options.MaxInput = None,
    max_output: options.MaxOutput = None,
    spread: options.Spread = 0.0,
    start: options.Start = None,
    end: options.End = None,
    origin: options.Origin = options.WEEK_ORIGIN,
    seed: options.Seed = 0,
    as_json: options.Json = False,
) -> None:
    """Find a fleet's capacity on a trace in virtual time, and show what is served beyond it.

    Capacity is the highest load at which 95 % of requests have their first token within 2 s and their last within 10 s
    when everything is sent at once. At each multiple of it: sent at once, and held at the proxy with a deadline
    for the first token and a goal for the last.
    """
    from gorgo.apps.simulate import SimJob
    from gorgo.apps.simulate.fleet import fleet_of, limits_of
    from gorgo.apps.simulate.overload import LOADS, capacity_scale, overload_rows
    from gorgo.config.load import load_config

    loaded = load_config(config)
    filters = options.trace_filters(
        limit=limit,
        max_input=max_input,
        max_output=max_output,
        spread=spread,
        start=start,
        end=end,
        seed=seed,
        origin=origin,
    )
    job = SimJob(
        trace=str(options.trace_path(trace)),
        policy=policy,
        fleet=fleet_of(loaded, source=config),
        filters=filters,
        seed=seed,
        limits=limits_of(loaded),
        probe_interval_s=loaded.proxy.probe_interval_s,
        scrape_interval_s=loaded.proxy.scrape_interval_s,
        slo_ttft_ms=slo_ttft_ms,
    )
    capacity = capacity_scale(replace(job, slo_ttft_ms=None))
    job = replace(job, scenario=scenario)
    rows = overload_rows(
        job,
        capacity=capacity,
        loads=tuple(load or LOADS),
        max_concurrency_per_replica=max_concurrency_per_replica,
        slo_e2e_ms=slo_e2e_ms,
    )
    if as_json:
        options.print_json([row.as_json() for row in rows])
    else:
        _show(rows, capacity)


def _show(rows: Sequence[OverloadRow], capacity: float) -> None:
    typer.echo(f"capacity of {rows[0].row.policy} on {rows[0].row.trace}: time scale {capacity:.3f}")
    typer.echo("  load  way      good %  good/s  turned away %  held %  hedged %  TTFT p95 ms  E2E p95 s")
    for row in rows:
        found, way = row.goodput, "held" if row.held else "at once"
        ttft, e2e = row.row.ttft_ms.p95, row.row.e2e_s.p95
        typer.echo(
            f"{row.load:>6g}  {way:<7}  {found.good * 100:>6.1f}  {found.per_s:>6.2f}  {found.rejected * 100:>13.1f}"
            f"  {found.held * 100:>6.1f}  {found.hedged * 100:>8.2f}"
            f"  {'-' if ttft is None else f'{ttft:.0f}':>11}  {'-' if e2e is None else f'{e2e:.2f}':>9}"
        )
