"""Commands of the tuner: `tune`, and what it did. This module alone imports `tuner`, and only inside its functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from gorgo.cli import options
from gorgo.cli.failures import BAD_INPUT, FAILED, fail
from gorgo.cli.tables import Cell, table

if TYPE_CHECKING:
    import asyncio

    from tuner.commands import CampaignOptions, Generation, OfflineOptions

Database = Annotated[
    str,
    typer.Option(
        envvar="GORGO_DATABASE_URL", metavar="URL", help="The tuner's history: sqlite:///FILE or postgresql://..."
    ),
]
DATABASE = "sqlite:///gorgo-history.sqlite3"


#: As in tuner/optimizers/registry.py, which is not imported for `--help`.
ALGORITHMS = ("es", "cma", "random", "fixed")


def tune(
    url: options.AdminUrl = options.ADMIN_URL,
    token: options.AdminToken = None,
    algorithm: Annotated[str, typer.Option(metavar="NAME", help="Who proposes: es, cma, random or fixed.")] = "es",
    mode: Annotated[
        str,
        typer.Option(
            metavar="MODE",
            help="How weight sets are compared: switchback (blocks of minutes, a test), guarded or paper (windows).",
        ),
    ] = "switchback",
    window: Annotated[int, typer.Option(min=2, help="Samples per window.")] = 128,
    hop: Annotated[int, typer.Option(min=1, help="Samples between two looks at a window.")] = 32,
    block_s: Annotated[float, typer.Option(help="Length of a block of one weight set, in seconds.")] = 120.0,
    discard_s: Annotated[
        float, typer.Option(help="First seconds of a block that do not count: they meet the queues of the one before.")
    ] = 30.0,
    rest_blocks: Annotated[
        float, typer.Option(help="So many blocks the incumbent has all traffic before each pair, unmeasured.")
    ] = 2.0,
    pairs: Annotated[int, typer.Option(min=1, help="At most so many pairs of blocks per candidate.")] = 20,
    alpha: Annotated[
        float, typer.Option(help="Probability at most of accepting a candidate that is no better.")
    ] = 0.05,
    warm_up_s: Annotated[float, typer.Option(help="Seconds before the weights in force are measured.")] = 60.0,
    no_guard: Annotated[
        bool, typer.Option("--no-guard", help="Accept a gain in TTFT whatever it does to everything else.")
    ] = False,
    tune_lambda: Annotated[
        bool, typer.Option("--tune-lambda", help="Move weights too that are preferences, as lambda.")
    ] = False,
    widen: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=LO:HI", show_default=False, help="Other bounds for a weight. Repeatable."),
    ] = None,
    start: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=V", show_default=False, help="Begin there instead of at what is in force. Repeatable."
        ),
    ] = None,
    max_generations: Annotated[int, typer.Option(min=1, help="Stop after so many.")] = 100,
    budget_s: Annotated[float | None, typer.Option(help="Stop after so many seconds.", show_default=False)] = None,
    freeze: Annotated[bool, typer.Option("--freeze", help="Pin what was found when the campaign stops.")] = False,
    new: Annotated[
        bool, typer.Option("--new", help="Leave an unfinished campaign on that proxy, and begin another.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Measure, say what would be put, and end; nothing is put or written.")
    ] = False,
    database: Database = DATABASE,
    poll_s: Annotated[float, typer.Option(min=0.05, help="Seconds between two looks at the proxy.")] = 1.0,
    metrics_bind: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", show_default=False, help="Own Prometheus figures there; port 0 takes a free one."
        ),
    ] = None,
    seed: options.MaybeSeed = None,
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="TRACE", show_default=False, help="Tune in virtual time on this trace, data set or shape instead."
        ),
    ] = None,
    request_log: Annotated[
        Path | None,
        typer.Option(metavar="FILE", show_default=False, help="The same on what `gorgo serve --request-log` wrote."),
    ] = None,
    rehearse: Annotated[
        bool,
        typer.Option("--rehearse", help="In virtual time: run the live campaign along the window, not the search."),
    ] = False,
    time_scale: options.TimeScale = 1.0,
    config: options.Config = options.REGIONS_YAML,
    policy: Annotated[
        str | None,
        typer.Option(metavar="NAME", show_default=False, help="In virtual time. Default: that of regions.yaml."),
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(metavar="FILE", show_default=False, help="In virtual time: start from this file's.")
    ] = None,
    fleet: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", show_default=False, help="In virtual time: engines as learned, a saved GET /admin/fleet."
        ),
    ] = None,
    limit: options.Limit = None,
    max_input: options.MaxInput = None,
    max_output: options.MaxOutput = None,
    spread: options.Spread = 0.0,
    begin: Annotated[
        str | None,
        typer.Option("--from", metavar="TIME", show_default=False, help="Window start, as --start of replay."),
    ] = None,
    end: Annotated[
        str | None, typer.Option("--to", metavar="TIME", show_default=False, help="Window end, not included.")
    ] = None,
    origin: options.Origin = options.WEEK_ORIGIN,
    seeds: Annotated[int, typer.Option(min=1, max=100, help="In virtual time: runs per candidate.")] = 3,
    held_out_seeds: Annotated[
        int, typer.Option(min=2, max=1000, help="In virtual time: runs of each finalist, which decide.")
    ] = 10,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", show_default=False, help="In virtual time: write a weights file, with evidence."),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, show_default=False, help="Runs at a time. Default: one per core.")
    ] = None,
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
    from gorgo.cli.running import run_until_stopped
    from gorgo.errors import TunerError
    from tuner.commands import CampaignOptions, tune_live

    try:
        campaign = CampaignOptions(
            mode=cast("Any", mode),
            window=window,
            hop=hop,
            guard=False if no_guard else None,
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
    if algorithm not in ALGORITHMS:
        raise typer.BadParameter(f"--algorithm {algorithm}: expected one of {', '.join(ALGORITHMS)}")
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
            start={name: number(text, "--start") for name, text in named(start, "--start NAME=V")},
            fleet=fleet,
            filters=window_filters,
            time_scale=options.positive(time_scale),
            database=database,
            out=out,
        )
        search = {
            "algorithm": algorithm,
            "seed": seed or 0,
            "asked": tune_lambda,
            "box": {name: bounds(text) for name, text in named(widen, "--widen NAME=LO:HI")},
        }
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
        "start": {name: number(text, "--start") for name, text in named(start, "--start NAME=V")},
        "widen": {name: bounds(text) for name, text in named(widen, "--widen NAME=LO:HI")},
        "tune_lambda": tune_lambda,
        "seed": seed,
        "begin_anew": new,
        "dry_run": dry_run,
        "poll_s": poll_s,
        "metrics_bind": None if metrics_bind is None else host_and_port(metrics_bind),
    }
    left_in_order = []

    async def program(stop: asyncio.Event) -> None:
        left_in_order.append(await tune_live(stop, campaign=campaign, **asked))

    run_until_stopped(program)
    raise typer.Exit(0 if left_in_order == [True] else FAILED)


def _recorded(source: str | None, *, config: Path, start: Mapping[str, float], **more: Any) -> OfflineOptions:
    """The window, and whose weights start where: --start before --weights before regions.yaml."""
    from gorgo.apps.simulate.fleet import fleet_of, limits_of
    from gorgo.cli.wiring import compose_policy
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

    found = search_offline(recorded, n_jobs=n_jobs, **search)
    if as_json:
        options.print_json(found.as_json())
        return
    typer.echo(generations_table(found.rows))
    typer.echo(f"\n{_weights(found.weights)}: {found.reason}")


def _rehearse(recorded: OfflineOptions, campaign: CampaignOptions, search: Mapping[str, Any], *, as_json: bool) -> None:
    from tuner.commands import rehearse_offline

    found = rehearse_offline(recorded, campaign, **search)
    if as_json:
        options.print_json(found.as_json())
        return
    typer.echo(generations_table(found.rows))
    typer.echo(f"\n{_weights(found.weights)}: {found.reason}")


def named(pairs: Sequence[str] | None, expected: str) -> list[tuple[str, str]]:
    """`NAME=TEXT` options as pairs."""
    for pair in pairs or []:
        if "=" not in pair:
            raise typer.BadParameter(f"{pair!r}: expected {expected}")
    return [(pair.partition("=")[0], pair.partition("=")[2]) for pair in pairs or []]


def number(text: str, option: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{option}: {text!r} is no number") from None


def bounds(text: str) -> tuple[float, float]:
    low, colon, high = text.partition(":")
    if not colon:
        raise typer.BadParameter(f"--widen: {text!r}: expected LO:HI")
    return number(low, "--widen"), number(high, "--widen")


def host_and_port(bind: str) -> tuple[str, int]:
    from gorgo.config.addresses import split_bind

    try:
        return split_bind(bind)
    except ValueError as error:
        raise typer.BadParameter(f"--metrics-bind: expected {error}") from error


def found_in_history(wanted: str, database: str) -> tuple[str, Mapping[str, float]]:
    """Policy and weights of `best` or of a generation's number."""
    from tuner.commands import weights_of

    return weights_of(wanted, database)


def note_freeze(database: str, weights: Mapping[str, float], reason: str) -> None:
    """The history learns of a freeze by hand."""
    from tuner.commands import note_freeze as note

    note(database, weights, reason)


def history(
    database: Database = DATABASE,
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
    if row is None:
        typer.echo(f"{database}: no campaign yet; `gorgo tune` starts one")
        return
    ended = "running, or to be continued" if row.outcome is None else row.outcome
    typer.echo(f"campaign {row.id}: {row.policy} on {row.target} since {_when(row.started_s)}; {ended}\n")
    typer.echo(generations_table(generations))
    for event in events:
        typer.echo(f"{_when(event.at_s)}  {event.kind}: {event.reason}")


def generations_table(generations: Sequence[Generation]) -> str:
    """One row per generation."""
    header = [
        "gen",
        "ended",
        "weights",
        "sigma",
        "n",
        "TTFT p95 ms",
        "incumbent",
        "E2E p95 s",
        "errors",
        "taken",
        "why",
    ]
    return table(header, [_row(one) for one in generations])


def _row(one: Generation) -> list[Cell]:
    return [
        one.number,
        _when(one.finished_s),
        _weights(one.weights),
        None if one.sigma is None else f"{one.sigma:.3f}",
        one.n,
        one.objective_ms,
        one.incumbent_objective_ms,
        one.e2e_s_p95,
        one.errors,
        "yes" if one.accepted else "no",
        one.reason,
    ]


def _weights(weights: Mapping[str, float]) -> str:
    return " ".join(f"{name}={value:.3g}" for name, value in weights.items())


def _when(at_s: float) -> str:
    """UTC, to the second: logs of other machines are read beside it."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S")
