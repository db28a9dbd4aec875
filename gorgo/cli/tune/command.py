"""Commands of the tuner: `tune`, and what it did. This module alone imports `tuner`, and only inside its functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from gorgo.cli import options
from gorgo.cli.errors import BAD_INPUT, FAILED, fail
from gorgo.cli.tune import options as given
from gorgo.cli.tune.generations import campaign_in_words, generations_table, weights_in_words

if TYPE_CHECKING:
    import asyncio

    from tuner.commands import CampaignOptions, OfflineFound, OfflineOptions

    # For modules beside this one, which have no door to the tuner of their own.
    from tuner.commands import CampaignRow as CampaignRow
    from tuner.commands import EventRow as EventRow
    from tuner.commands import Generation as Generation


def tune(
    url: options.AdminUrl = options.ADMIN_URL,
    token: options.AdminToken = None,
    algorithm: given.Algorithm = "es",
    mode: given.Mode = "switchback",
    window: given.Window = 128,
    hop: given.Hop = 32,
    block_s: given.BlockS = 120.0,
    discard_s: given.DiscardS = 30.0,
    rest_blocks: given.RestBlocks = 2.0,
    pairs: given.Pairs = 20,
    alpha: given.Alpha = 0.05,
    warm_up_s: given.WarmUpS = 60.0,
    no_guard: given.NoGuard = False,
    tune_lambda: given.TuneLambda = False,
    widen: given.Widen = None,
    start: given.StartAt = None,
    max_generations: given.MaxGenerations = 100,
    budget_s: given.BudgetS = None,
    freeze: given.Freeze = False,
    new: given.BeginAnew = False,
    dry_run: given.DryRun = False,
    database: given.Database = given.DATABASE,
    poll_s: given.PollS = 1.0,
    metrics_bind: given.MetricsBind = None,
    seed: options.MaybeSeed = None,
    trace: given.Trace = None,
    request_log: given.RequestLog = None,
    rehearse: given.Rehearse = False,
    time_scale: options.TimeScale = 1.0,
    config: options.Config = options.REGIONS_YAML,
    policy: given.Policy = None,
    weights: given.Weights = None,
    fleet: given.Learned = None,
    limit: options.Limit = None,
    max_input: options.MaxInput = None,
    max_output: options.MaxOutput = None,
    spread: options.Spread = 0.0,
    begin: given.From = None,
    end: given.To = None,
    origin: options.Origin = options.WEEK_ORIGIN,
    seeds: given.Seeds = 3,
    held_out_seeds: given.HeldOutSeeds = 10,
    out: given.WeightsOut = None,
    jobs: given.Jobs = None,
    as_json: options.Json = False,
) -> None:
    """Tune the weights of a running proxy, or in virtual time on a recorded window.

    Runs beside the proxy until nothing better is found; SIGTERM leaves the best weights in force, and the next start
    goes on. The proxy does not need it: it may die, lag or be absent. With --trace or --request-log no proxy is asked:
    every candidate is a simulated run of the whole window, and what is found is a file for `gorgo serve --weights`.
    """
    offline = trace is not None or request_log is not None
    if trace is not None and request_log is not None:
        raise typer.BadParameter("--trace and --request-log: expected one of them")
    if not offline and (rehearse or out is not None or fleet is not None or weights is not None):
        raise typer.BadParameter("--rehearse, --out, --fleet and --weights need --trace or --request-log")
    if dry_run and start:
        raise typer.BadParameter("--dry-run measures the weights in force: leave out --start")
    from gorgo.cli.serve import run_until_stopped
    from gorgo.errors import TunerError
    from tuner.commands import CampaignOptions, tune_live

    try:
        campaign = CampaignOptions(
            mode=cast("Any", mode),
            window=window,
            hop=hop,
            guard=not no_guard,
            warm_up_s=warm_up_s,
            block_s=block_s,
            discard_s=discard_s,
            rest_blocks=rest_blocks,
            pairs=pairs,
            alpha=alpha,
            max_generations=max_generations,
            budget_s=budget_s,
            freeze_at_end=freeze,
        )
    except TunerError as error:
        raise fail(str(error), code=BAD_INPUT) from error
    given.checked_algorithm(algorithm)
    if offline:
        window_filters = options.trace_filters(
            limit=limit,
            max_input=max_input,
            max_output=max_output,
            spread=spread,
            start=begin,
            end=end,
            seed=seed or 0,
            origin=origin,
        )
        recorded = _recorded(
            trace if request_log is None else str(request_log),
            config=config,
            policy=policy,
            weights=weights,
            start=given.start_of(start),
            fleet=fleet,
            filters=window_filters,
            time_scale=options.positive(time_scale),
            database=database,
            out=out,
        )
        search = {"algorithm": algorithm, "seed": seed or 0, "asked": tune_lambda, "box": given.box_of(widen)}
        if rehearse:
            _rehearse(recorded, campaign, search, as_json=as_json)
        else:
            counts = {"candidates": max_generations, "seeds": seeds, "held_out_seeds": held_out_seeds}
            _search(recorded, search | counts, n_jobs=-1 if jobs is None else jobs, as_json=as_json)
        return
    asked: dict[str, Any] = {
        "url": url,
        "token": token,
        "database": database,
        "algorithm": algorithm,
        "start": given.start_of(start),
        "allow_out_of_range": given.box_of(widen),
        "tune_lambda": tune_lambda,
        "seed": seed,
        "new_campaign": new,
        "dry_run": dry_run,
        "poll_s": poll_s,
        "metrics_bind": None if metrics_bind is None else given.host_and_port(metrics_bind),
    }
    left_in_order = []

    async def program(stop: asyncio.Event) -> None:
        left_in_order.append(await tune_live(stop, campaign=campaign, **asked))

    run_until_stopped(program)
    raise typer.Exit(0 if left_in_order == [True] else FAILED)


def _recorded(source: str | None, *, config: Path, start: Mapping[str, float], **more: Any) -> OfflineOptions:
    """The window, and whose weights start where: --start before --weights before regions.yaml."""
    from gorgo.apps.simulate.fleet import fleet_of, limits_of
    from gorgo.cli.policy_setup import compose_policy
    from gorgo.config.load import load_config
    from tuner.commands import offline_options

    loaded = load_config(config)
    policy, values = compose_policy(loaded, source=config, policy=more.pop("policy"), weights_file=more.pop("weights"))
    return offline_options(
        source=str(options.trace_path(str(source))),
        policy=policy.name,
        weights={**values, **start},
        fleet=fleet_of(loaded, source=config),
        limits=limits_of(loaded),
        probe_interval_s=loaded.proxy.probe_interval_s,
        scrape_interval_s=loaded.proxy.scrape_interval_s,
        fleet_file=more.pop("fleet"),
        **more,
    )


def _search(recorded: OfflineOptions, search: Mapping[str, Any], *, n_jobs: int, as_json: bool) -> None:
    from tuner.commands import search_offline

    _tell(search_offline(recorded, n_jobs=n_jobs, **search), as_json=as_json)


def _rehearse(recorded: OfflineOptions, campaign: CampaignOptions, search: Mapping[str, Any], *, as_json: bool) -> None:
    from tuner.commands import rehearse_offline

    _tell(rehearse_offline(recorded, campaign, **search), as_json=as_json)


def _tell(found: OfflineFound, *, as_json: bool) -> None:
    if as_json:
        options.print_json(found.as_json())
        return
    typer.echo(generations_table(found.rows))
    typer.echo(f"\n{weights_in_words(found.weights)}: {found.reason}")


def found_in_history(wanted: str, database: str) -> tuple[str, Mapping[str, float]]:
    """Policy and weights of `best` or of a generation's number."""
    from tuner.commands import weights_of

    return weights_of(wanted, database)


def note_freeze(database: str, weights: Mapping[str, float], reason: str) -> None:
    """The history learns of a freeze by hand."""
    from tuner.commands import note_freeze as note

    note(database, weights, reason)


def history(
    database: given.Database = given.DATABASE,
    campaign: Annotated[int | None, typer.Option(min=1, show_default=False, help="Default: the newest.")] = None,
    last: Annotated[int, typer.Option(min=1, max=100_000, help="The last so many generations.")] = 1000,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", show_default=False, help="Write history.json there, for `gorgo report`."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", show_default=False, help="Plot weights, sigma and objective: .svg, .png or .pdf."),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Show which weights the tuner tried, and what became of each.

    One row per generation: its weights, what was measured beside the incumbent's, and why it was taken or not.
    """
    from tuner.commands import read_history, write_history

    row, generations, events = read_history(database, campaign=campaign, limit=last)
    if out is not None:
        write_history(out / "history.json", row, generations)
    if plot is not None:
        from gorgo.apps.report import write_tuning_plot

        write_tuning_plot(plot, [one.as_json() for one in generations])
    if as_json:
        shown = {
            "campaign": None if row is None else asdict(row) | {"options": dict(row.options)},
            "generations": [one.as_json() for one in generations],
            "events": [asdict(event) for event in events],
        }
        options.print_json(shown)
        return
    typer.echo(campaign_in_words(database, row, generations, events))
