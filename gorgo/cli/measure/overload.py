"""`gorgo overload`: capacity of a fleet, and goodput beyond it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from gorgo.cli import options

if TYPE_CHECKING:
    from gorgo.apps.simulate.overload import OverloadRow


def overload(
    trace: options.Trace,
    policy: Annotated[str, typer.Option(metavar="NAME", help="Routing policy; one that predicts TTFT.")] = "gorgo-ms",
    load: Annotated[
        list[float] | None,
        typer.Option(
            min=0.01,
            callback=options.finite,
            show_default=False,
            help="Load as a multiple of capacity; repeatable. Default: 0.7, 1, 1.3, 3.",
        ),
    ] = None,
    config: options.Config = options.REGIONS_YAML,
    fleet: options.Fleet = None,
    limit: options.Limit = None,
    max_input: options.MaxInput = None,
    max_output: options.MaxOutput = None,
    spread: options.Spread = 0.0,
    seed: options.Seed = 0,
    as_json: options.Json = False,
) -> None:
    """Find the capacity of a fleet on a trace in virtual time, and its goodput beyond it.

    Capacity is the highest load at which 95 % of requests get their first token within 2 s and their last within 10 s,
    each dispatched at once. At each multiple of it there are two rows: without the queue of the proxy and with it.
    Queued requests have these times as deadline and goal unless overload.slo_ttft_ms and slo_e2e_ms are configured.
    """
    from gorgo.apps.simulate import SimJob
    from gorgo.apps.simulate.fleet import chosen_fleet, limits_of
    from gorgo.apps.simulate.overload import LOADS, capacity_scale, overload_rows
    from gorgo.config.load import load_config

    loaded = load_config(config)
    filters = options.trace_filters(limit=limit, max_input=max_input, max_output=max_output, spread=spread, seed=seed)
    job = SimJob(
        trace=str(options.trace_path(trace)),
        policy=policy,
        fleet=chosen_fleet(loaded, fleet, source=config),
        filters=filters,
        seed=seed,
        limits=limits_of(loaded),
        probe_interval_s=loaded.proxy.probe_interval_s,
        scrape_interval_s=loaded.proxy.scrape_interval_s,
    )
    capacity = capacity_scale(job)
    rows = overload_rows(job, capacity=capacity, loads=tuple(load or LOADS))
    if as_json:
        options.print_json([row.as_json() for row in rows])
    else:
        _show(rows, capacity)


def _show(rows: Sequence[OverloadRow], capacity: float) -> None:
    typer.echo(f"capacity of {rows[0].row.policy} on {rows[0].row.trace}: {1 / capacity:.3f} of the trace's own load")
    typer.echo("load: a multiple of capacity")
    typer.echo("  load  dispatch  good %  good/s  rejected %  queued %  hedged %  TTFT p95 ms  E2E p95 s")
    for row in rows:
        found, dispatch = row.goodput, "queued" if row.queueing else "at once"
        ttft, e2e = row.row.ttft_ms.p95, row.row.e2e_s.p95
        typer.echo(
            f"{row.load:>6g}  {dispatch:<8}  {found.good * 100:>6.1f}  {found.per_s:>6.2f}"
            f"  {found.rejected * 100:>10.1f}  {found.queued * 100:>8.1f}  {found.hedged * 100:>8.2f}"
            f"  {'-' if ttft is None else f'{ttft:.0f}':>11}  {'-' if e2e is None else f'{e2e:.2f}':>9}"
        )
