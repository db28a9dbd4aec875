"""`gorgo tune-offline`: tune weights in virtual time, on a trace or a request log."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from gorgo.cli import options
from gorgo.cli.tune import options as tuning
from gorgo.cli.tune.history import generations_table, weights_in_words


def tune_offline(
    trace: Annotated[
        str, typer.Argument(help="File, name or shape of a trace; or the file that `gorgo serve --request-log` wrote.")
    ],
    config: options.Config = options.REGIONS_YAML,
    policy: Annotated[
        str | None,
        typer.Option(metavar="NAME", show_default=False, help="Routing policy. Default: the one of regions.yaml."),
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(metavar="FILE", show_default=False, help="Weights file with the initial weights.")
    ] = None,
    fleet: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            show_default=False,
            help="Fleet of `gorgo fleets`, or a file with learned engine speeds: a saved GET /admin/fleet.",
        ),
    ] = None,
    rehearse: Annotated[
        Literal["switchback", "paper"] | None,
        typer.Option(show_default=False, help="Run the live campaign in this mode along the trace, not the search."),
    ] = None,
    algorithm: tuning.Algorithm = None,
    settings: tuning.Settings = None,
    max_generations: tuning.MaxGenerations = 100,
    seeds: options.Seeds = 3,
    load: options.Load = None,
    time_scale: options.TimeScale = None,
    limit: options.Limit = None,
    max_input: options.MaxInput = None,
    max_output: options.MaxOutput = None,
    start: options.Start = None,
    end: options.End = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", show_default=False, help="Write a weights file with its evidence there."),
    ] = None,
    database: tuning.Database = tuning.DATABASE,
    jobs: options.Jobs = None,
    seed: options.Seed = 0,
    as_json: options.Json = False,
) -> None:
    """Tune weights in virtual time, on a trace or a request log.

    Each candidate is a simulated run of the first two thirds of the trace. The last third decides whether the best one
    replaces the initial weights. No proxy is involved; `gorgo serve --weights` and `gorgo freeze --weights` take the
    file that --out names.
    """
    from gorgo.cli.policies import compose_policy
    from gorgo.cli.tune.options import campaign_options, read_settings
    from gorgo.config.load import load_config
    from gorgo.lab.request_log import skipped_lines
    from gorgo.lab.sim.fleet import FLEETS, chosen_fleet, limits_of
    from tuner.commands import offline_options, rehearse_offline, search_offline

    named = fleet if fleet in FLEETS else None
    rare, loaded = read_settings(settings), load_config(config)
    tuned, values = compose_policy(loaded, source=config, policy=policy, weights_file=weights)
    recorded = offline_options(
        source=str(options.trace_path(trace)),
        policy=tuned.name,
        weights={**values, **rare.initial_weights},
        fleet=chosen_fleet(loaded, named, source=config),
        limits=limits_of(loaded),
        probe_interval_s=loaded.proxy.probe_interval_s,
        scrape_interval_s=loaded.proxy.scrape_interval_s,
        fleet_file=None if fleet is None or named is not None else Path(fleet),
        filters=options.trace_filters(
            limit=limit, max_input=max_input, max_output=max_output, start=start, end=end, seed=seed
        ),
        time_scale=options.time_scale_of(time_scale, load),
        database=database,
        out=out,
    )
    search: dict[str, Any] = {
        "algorithm": tuning.checked_algorithm(algorithm),
        "seed": seed,
        "tune_lambda": rare.tune_lambda,
        "box": rare.bounds,
    }
    if rehearse is not None:
        campaign = campaign_options(rare, mode=rehearse, max_generations=max_generations)
        found = rehearse_offline(recorded, campaign, **search)
    else:
        search |= {"candidates": max_generations, "seeds": seeds, "held_out_seeds": rare.held_out_seeds}
        found = search_offline(recorded, n_jobs=-1 if jobs is None else jobs, **search)
    warning = skipped_lines(Path(recorded.source))
    if warning is not None:
        typer.echo(f"gorgo: {warning}", err=True)
    if as_json:
        options.print_json(found.as_json())
        return
    typer.echo(generations_table(found.rows))
    typer.echo(f"\n{weights_in_words(found.weights)}: {found.reason}")
