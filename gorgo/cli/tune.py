"""`gorgo tune`, `gorgo tune-offline` and `gorgo history`: weights that are tuned.

Owns their arguments, the file of rarely changed settings, and the words for a campaign and its generations. Both tuning
commands take the same file with `--settings`, so that a campaign can be rehearsed with the settings that will run live.
Leaves the checks of a campaign's values to `CampaignOptions`, and the database to `tuner.history`.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self
from urllib.parse import urlsplit

import typer
from pydantic import Field

from gorgo.cli import options
from gorgo.cli.errors import BAD_INPUT, FAILED, fail
from gorgo.cli.tables import Cell, table
from gorgo.config.load import load_settings
from gorgo.config.values import strict

if TYPE_CHECKING:
    import asyncio

    from tuner.commands import CampaignOptions, CampaignRow, EventRow, Generation


#: As in tuner/history, which is not imported for `--help`.
DATABASE = "sqlite:///gorgo-history.sqlite3"
#: As in tuner/optimizers/registry.py, which is not imported either.
ALGORITHMS = ("es", "es-probes", "es-published", "es-released", "cma", "random", "fixed")

Database = Annotated[
    str,
    typer.Option(
        envvar="GORGO_DATABASE_URL", metavar="URL", help="History of the tuner: sqlite:///FILE or postgresql://..."
    ),
]
Algorithm = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        show_default="es-probes; es-published in mode paper",
        help="Optimizer that proposes candidates: es, es-probes, es-published, es-released, cma, random or fixed.",
    ),
]
Settings = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", show_default=False, help="YAML file of rarely changed settings; docs/reference.md lists them."
    ),
]
MaxGenerations = Annotated[int, typer.Option(min=1, help="Stop after this many generations.")]


def checked_algorithm(name: str | None) -> str | None:
    """Return the name of an optimizer of the registry or of another package's entry point, or raise a usage error."""
    if name is None:
        return None
    algorithms = [*ALGORITHMS, *(entry_point.name for entry_point in entry_points(group="gorgo.optimizers"))]
    if name not in algorithms:
        raise typer.BadParameter(f"--algorithm {name}: expected one of {', '.join(algorithms)}")
    return name


@strict
@dataclass(frozen=True, slots=True, kw_only=True)
class TuneSettings:
    """Keys of the file; docs/reference.md has their meanings, and `CampaignOptions` checks those of a campaign."""

    window: int = 128
    hop: int = 32
    block_s: float = 120.0
    discard_s: float = 30.0
    rest_blocks: float = 2.0
    pairs: int = 20
    alpha: float = 0.05
    warm_up_s: float = 60.0
    guard: bool = True
    tune_lambda: bool = False
    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    initial_weights: Mapping[str, float] = field(default_factory=dict)
    poll_s: Annotated[float, Field(ge=0.05, le=3600)] = 1.0
    proxy_wait_s: Annotated[float, Field(ge=0, le=31_536_000)] = 60.0
    decision_log: Path | None = None
    held_out_seeds: Annotated[int, Field(ge=2, le=1000)] = 10


def read_settings(path: Path | None) -> TuneSettings:
    """Return the settings of the file, or the defaults without one. Raises `ConfigError`."""
    return TuneSettings() if path is None else load_settings(path, TuneSettings)


def campaign_options(
    settings: TuneSettings,
    *,
    mode: str,
    max_generations: int,
    budget_s: float | None = None,
    freeze_at_end: bool = False,
) -> CampaignOptions:
    """Return the options of a campaign; a value that it refuses ends the program with exit code 2."""
    from gorgo.errors import TunerError
    from tuner.commands import CampaignOptions

    try:
        return CampaignOptions(
            mode=mode,  # type: ignore[arg-type] # CampaignOptions names the modes that exist
            window=settings.window,
            hop=settings.hop,
            block_s=settings.block_s,
            discard_s=settings.discard_s,
            rest_blocks=settings.rest_blocks,
            pairs=settings.pairs,
            alpha=settings.alpha,
            warm_up_s=settings.warm_up_s,
            guard=settings.guard,
            max_generations=max_generations,
            budget_s=budget_s,
            freeze_at_end=freeze_at_end,
        )
    except TunerError as error:
        raise fail(str(error), code=BAD_INPUT) from error


def tune(
    url: options.AdminUrls = options.ADMIN_URLS,
    every_address: Annotated[
        bool,
        typer.Option(
            "--every-address",
            help="Each --url stands for all addresses of its name; end, to be started again, when they change.",
        ),
    ] = False,
    algorithm: Algorithm = None,
    mode: Annotated[
        str,
        typer.Option(
            metavar="MODE",
            help="How weight sets are compared: switchback (blocks of minutes, a sequential test) or paper (windows).",
        ),
    ] = "switchback",
    settings: Settings = None,
    max_generations: MaxGenerations = 100,
    budget_s: Annotated[
        float | None, typer.Option(callback=options.finite, help="Stop after this many seconds.", show_default=False)
    ] = None,
    freeze: Annotated[bool, typer.Option("--freeze", help="Freeze the incumbent when the campaign stops.")] = False,
    new: Annotated[bool, typer.Option("--new", help="Start a new campaign instead of resuming.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Measure and print candidates; change and store nothing.")
    ] = False,
    database: Database = DATABASE,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", show_default=False, help="File whose `shared` names a store for the leader's lease."
        ),
    ] = None,
    metrics_bind: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            show_default=False,
            help="Address of the tuner's own Prometheus metrics; port 0 takes a free one.",
        ),
    ] = None,
    seed: options.MaybeSeed = None,
    log_format: options.LogFormat = "text",
    log_level: options.LogLevel = "info",
) -> None:
    """Tune the weights of a running proxy, or of several.

    Runs beside the proxy until the search ends. With several --url the samples of all count, and weights are put at
    all or at none. Of several tuners one leads and the others wait, with a history in PostgreSQL or with a store.
    SIGTERM restores the incumbent, and the next start resumes the campaign. The proxy does not depend on the tuner.
    Without a proxy the command gives up after a minute, or after the setting proxy_wait_s.
    """
    from gorgo.cli.app import run_until_stopped
    from gorgo.config.load import load_config
    from tuner.commands import tune_live

    rare = read_settings(settings)
    if dry_run and rare.initial_weights:
        raise typer.BadParameter(f"--dry-run measures the weights in force: leave out initial_weights in {settings}")
    campaign = campaign_options(
        rare, mode=mode, max_generations=max_generations, budget_s=budget_s, freeze_at_end=freeze
    )
    urls = tuple(addresses_of(url)) if every_address else tuple(url)
    sidecar: dict[str, Any] = {
        "url": urls[0],
        "further_urls": urls[1:],
        "token": options.admin_token(),
        "database": database,
        "algorithm": checked_algorithm(algorithm),
        "start": rare.initial_weights,
        "allow_out_of_range": rare.bounds,
        "tune_lambda": rare.tune_lambda,
        "seed": seed,
        "new_campaign": new,
        "dry_run": dry_run,
        "poll_s": rare.poll_s,
        "proxy_wait_s": rare.proxy_wait_s,
        "log_filter": None if rare.decision_log is None else _log_filter(rare.decision_log),
        "log_format": log_format,
        "log_level": log_level,
        "shared": None if config is None else load_config(config).shared,
        "metrics_bind": None if metrics_bind is None else _host_and_port(metrics_bind),
    }
    left_in_order = []

    async def program(stop: asyncio.Event) -> None:
        changes = Changes(url, urls, stop) if every_address else None
        async with changes or nullcontext():
            left_in_order.append(await tune_live(stop, campaign=campaign, **sidecar))
        if changes is not None and changes.found:
            left_in_order.clear()

    run_until_stopped(program)
    raise typer.Exit(0 if left_in_order == [True] else FAILED)


def _log_filter(path: Path) -> Callable[[str], Callable[[Mapping[str, float], Mapping[str, float]], str | None]]:
    """Return what makes the filter of a log by the tuned policy's name; the laboratory is loaded with it alone."""
    from gorgo.lab.whatif import LogFilter

    return partial(LogFilter.of, path)


#: Between two resolutions of the names, s: the usual time for which DNS answers may be cached.
RESOLVE_S = 30.0


def addresses_of(urls: Sequence[str]) -> list[str]:
    """Return a URL per address of the names in `urls`, in a stable order. Raises a usage error for an unknown name."""
    addresses: dict[str, None] = {}
    for url in urls:
        parts = urlsplit(url)
        try:
            rows = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_STREAM)
        except OSError as error:
            raise typer.BadParameter(f"--url {url}: expected a name with addresses: {error}") from error
        for host in sorted({str(info[4][0]) for info in rows}):
            bracketed = f"[{host}]" if ":" in host else host
            addresses[parts._replace(netloc=f"{bracketed}:{parts.port or 80}").geturl()] = None
    return list(addresses)


class Changes:
    """Sets `stop` when the names in `urls` have other addresses than `before`: a tuner's proxies are fixed."""

    def __init__(self, urls: Sequence[str], before: Sequence[str], stop: asyncio.Event) -> None:
        self._urls = urls
        self._before = set(before)
        self._stop = stop
        self._task: asyncio.Task[None] | None = None
        self.found = False

    async def __aenter__(self) -> Self:
        import asyncio

        self._task = asyncio.create_task(self._follow())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None, "entered"
        self._task.cancel()

    async def _follow(self) -> None:
        import asyncio

        while True:
            await asyncio.sleep(RESOLVE_S)
            try:
                now = await asyncio.to_thread(addresses_of, self._urls)
            except typer.BadParameter:
                continue  # a name server that does not answer changes no pods
            if set(now) != self._before:
                typer.echo(f"gorgo: the addresses of {', '.join(self._urls)} have changed", err=True)
                self.found = True
                self._stop.set()
                return


def _host_and_port(bind: str) -> tuple[str, int]:
    from gorgo.config.values import split_bind

    try:
        return split_bind(bind)
    except ValueError as error:
        raise typer.BadParameter(f"--metrics-bind: expected {error}") from error


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
    algorithm: Algorithm = None,
    settings: Settings = None,
    max_generations: MaxGenerations = 100,
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
    database: Database = DATABASE,
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
        "algorithm": checked_algorithm(algorithm),
        "seed": seed,
        "tune_lambda": rare.tune_lambda,
        "box": rare.bounds,
    }
    if rehearse is not None:
        campaign = campaign_options(rare, mode=rehearse, max_generations=max_generations)
        result = rehearse_offline(recorded, campaign, **search)
    else:
        search |= {"candidates": max_generations, "seeds": seeds, "held_out_seeds": rare.held_out_seeds}
        result = search_offline(recorded, n_jobs=-1 if jobs is None else jobs, **search)
    warning = skipped_lines(Path(recorded.source))
    if warning is not None:
        typer.echo(f"gorgo: {warning}", err=True)
    if as_json:
        options.print_json(result.as_json())
        return
    typer.echo(generations_table(result.rows))
    typer.echo(f"\n{weights_in_words(result.weights)}: {result.reason}")


#: Characters of a text in a table: a reason of the tuner has some 100.
MAX_SHOWN = 300


def campaign_in_words(
    database: str, campaign: CampaignRow | None, generations: Sequence[Generation], events: Sequence[EventRow]
) -> str:
    """Return the text that `gorgo history` prints."""
    if campaign is None:
        return f"{database}: no campaign yet; `gorgo tune` starts one"
    ended = "running, or to be continued" if campaign.outcome is None else campaign.outcome
    since = moment(campaign.started_s)
    head = f"campaign {campaign.id}: {line(campaign.policy)} on {line(campaign.target)} since {since}; {line(ended)}"
    noted = [f"{moment(event.at_s)}  {line(event.kind)}: {line(event.reason)}" for event in events]
    return "\n".join([head, "", generations_table(generations), *noted])


def generations_table(generations: Sequence[Generation]) -> str:
    """Return a table with a row per generation."""
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
        moment(one.finished_s),
        weights_in_words(one.weights),
        None if one.sigma is None else f"{one.sigma:.3f}",
        one.n,
        one.objective_ms,
        one.incumbent_objective_ms,
        one.e2e_s_p95,
        one.errors,
        "yes" if one.accepted else "no",
        line(one.reason),
    ]


def weights_in_words(weights: Mapping[str, float]) -> str:
    """Return the weights as `name=value` pairs."""
    return " ".join(f"{name}={value:.3g}" for name, value in weights.items())


def line(text: str) -> str:
    """Return a text of the history as part of one line: a terminal obeys control characters."""
    shown = "".join(character if character.isprintable() else " " for character in text)
    return shown if len(shown) <= MAX_SHOWN else shown[: MAX_SHOWN - 3] + "..."


def moment(at_s: float) -> str:
    """Return a Unix time as UTC, to the second, for comparison with the logs of other hosts."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S")


def history(
    database: Database = DATABASE,
    campaign: Annotated[
        int | None, typer.Option(min=1, show_default=False, help="Number of the campaign. Default: the newest.")
    ] = None,
    last: Annotated[int, typer.Option(min=1, max=100_000, help="Show at most this many generations.")] = 1000,
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
    """Show the weights that the tuner tried and the result of each.

    One row per generation: its weights, its measurements beside the incumbent's, and why it was accepted or rejected.
    """
    from tuner.commands import read_history, write_history

    campaign_row, generations, events = read_history(database, campaign=campaign, limit=last)
    if out is not None:
        write_history(out / "history.json", campaign_row, generations)
    if plot is not None:
        from gorgo.lab.report import write_tuning_plot

        write_tuning_plot(plot, [one.as_json() for one in generations])
    if as_json:
        shown = {
            "campaign": None
            if campaign_row is None
            else asdict(campaign_row) | {"options": dict(campaign_row.options)},
            "generations": [one.as_json() for one in generations],
            "events": [asdict(event) for event in events],
        }
        options.print_json(shown)
        return
    typer.echo(campaign_in_words(database, campaign_row, generations, events))
