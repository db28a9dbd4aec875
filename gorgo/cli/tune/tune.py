"""`gorgo tune`: tune the weights of a running proxy."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self
from urllib.parse import urlsplit

import typer

from gorgo.cli import options
from gorgo.cli.errors import FAILED
from gorgo.cli.tune import options as tuning

if TYPE_CHECKING:
    import asyncio


def tune(
    url: options.AdminUrls = options.ADMIN_URLS,
    every_address: Annotated[
        bool,
        typer.Option(
            "--every-address",
            help="Each --url stands for all addresses of its name; end, to be started again, when they change.",
        ),
    ] = False,
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
        float | None, typer.Option(callback=options.finite, help="Stop after this many seconds.", show_default=False)
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
    urls = tuple(addresses_of(url)) if every_address else tuple(url)
    sidecar: dict[str, Any] = {
        "url": urls[0],
        "further_urls": urls[1:],
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
    found: dict[str, None] = {}
    for url in urls:
        parts = urlsplit(url)
        try:
            rows = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_STREAM)
        except OSError as error:
            raise typer.BadParameter(f"--url {url}: expected a name with addresses: {error}") from error
        for host in sorted({str(row[4][0]) for row in rows}):
            place = f"[{host}]" if ":" in host else host
            found[parts._replace(netloc=f"{place}:{parts.port or 80}").geturl()] = None
    return list(found)


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
    from gorgo.config.addresses import split_bind

    try:
        return split_bind(bind)
    except ValueError as error:
        raise typer.BadParameter(f"--metrics-bind: expected {error}") from error
