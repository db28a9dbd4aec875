"""`gorgo tune`: tune the weights of a running proxy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gorgo.cli import options
from gorgo.cli.errors import FAILED
from gorgo.cli.tune import options as tuning

if TYPE_CHECKING:
    import asyncio


def tune(
    url: options.AdminUrls = options.ADMIN_URLS,
    algorithm: tuning.Algorithm = None,
    mode: Annotated[
        str,
        typer.Option(
            metavar="MODE",
            help="How weight sets are compared: switchback (blocks of minutes, a sequential test) or paper (windows).",
        ),
    ] = "switchback",
    settings: tuning.Settings = None,
    max_generations: tuning.MaxGenerations = 100,
    budget_s: Annotated[
        float | None,
        typer.Option(callback=options.finite, help="Stop after this many seconds.", show_default=False),
    ] = None,
    freeze: Annotated[bool, typer.Option("--freeze", help="Freeze the incumbent when the campaign stops.")] = False,
    new: Annotated[bool, typer.Option("--new", help="Start a new campaign instead of resuming.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Measure and print candidates; change and store nothing.")
    ] = False,
    database: tuning.Database = tuning.DATABASE,
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
    from gorgo.cli.signals import run_until_stopped
    from gorgo.cli.tune.options import campaign_options, read_settings
    from gorgo.config.load import load_config
    from tuner.commands import tune_live

    rare = read_settings(settings)
    if dry_run and rare.initial_weights:
        raise typer.BadParameter(f"--dry-run measures the weights in force: leave out initial_weights in {settings}")
    campaign = campaign_options(
        rare, mode=mode, max_generations=max_generations, budget_s=budget_s, freeze_at_end=freeze
    )
    sidecar: dict[str, Any] = {
        "url": url[0],
        "further_urls": tuple(url[1:]),
        "token": options.admin_token(),
        "database": database,
        "algorithm": tuning.checked_algorithm(algorithm),
        "start": rare.initial_weights,
        "allow_out_of_range": rare.bounds,
        "tune_lambda": rare.tune_lambda,
        "seed": seed,
        "new_campaign": new,
        "dry_run": dry_run,
        "poll_s": rare.poll_s,
        "proxy_wait_s": rare.proxy_wait_s,
        "log_format": log_format,
        "log_level": log_level,
        "shared": None if config is None else load_config(config).shared,
        "metrics_bind": None if metrics_bind is None else _host_and_port(metrics_bind),
    }
    left_in_order = []

    async def program(stop: asyncio.Event) -> None:
        left_in_order.append(await tune_live(stop, campaign=campaign, **sidecar))

    run_until_stopped(program)
    raise typer.Exit(0 if left_in_order == [True] else FAILED)


def _host_and_port(bind: str) -> tuple[str, int]:
    from gorgo.config.addresses import split_bind

    try:
        return split_bind(bind)
    except ValueError as error:
        raise typer.BadParameter(f"--metrics-bind: expected {error}") from error
