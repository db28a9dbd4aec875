"""`gorgo check`: whether regions.yaml is valid, and its replicas and fleet sources answer."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gorgo import formatting
from gorgo.cli import options
from gorgo.cli.errors import FAILED, fail
from gorgo.cli.tables import table
from gorgo.formatting import first_names

if TYPE_CHECKING:
    from gorgo.cli.connectivity import Reached
    from gorgo.config.model import Config

#: Names in a row; a replica with adapters lists hundreds.
MODELS_SHOWN = 4


def check(
    config: options.Config = options.REGIONS_YAML,
    weights: options.Weights = None,
    live: Annotated[
        bool, typer.Option("--live", help="Also send a request to every fleet source and every replica.")
    ] = False,
    no_files: Annotated[
        bool, typer.Option("--no-files", help="Skip what needs this machine: files, environment variables, addresses.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Validate regions.yaml as `gorgo serve` does.

    Lists every error with its key, line and value, those of certificates, keys and variables included; warns of a url
    with a path and of one used twice, of reports of caches that no decision uses, and of scrapes that are too slow for
    the policy. With --live the command also sends a request to every fleet source, and to every
    replica of the file and of the sources; the exit code is 1 if one does not answer as expected.
    """
    from gorgo.cli.validation import Overrides, examine, ports_in_use
    from gorgo.config.load import items, read_text
    from gorgo.config.replica_advice import (
        model_warnings,
        report_warnings,
        scrape_warnings,
        several_addresses,
        url_warnings,
    )
    from gorgo.formatting import counted
    from gorgo.policies.registry import make_shadow

    if live and no_files:
        raise typer.BadParameter("--live and --no-files: expected one of them")
    token = None if no_files else options.admin_token()
    overrides = Overrides(
        environ=os.environ,
        admin_token=token,
        metrics_token=None if no_files else options.metrics_token(),
        weights_file=weights,
        machine=not no_files,
    )
    document, valid = examine(read_text(config), source=config, overrides=overrides)
    name = None if valid is None else valid.policy.name
    reached: list[Reached] = []
    sources: list[dict[str, Any]] = []
    warnings: list[str] = []
    shared: dict[str, str] | None = None
    if valid is not None:
        loaded = valid.config
        shared = _shared(loaded)
        shadow = make_shadow(loaded.proxy.shadow_policy, valid.policy)
        policies = [valid.policy] if shadow is None else [valid.policy, shadow]
        warnings = url_warnings(loaded.replicas)
        warnings += report_warnings(loaded, policies)
        warnings += scrape_warnings(loaded.proxy.scrape_interval_s, policies)
        if not no_files and not live:  # with --live the proxy usually runs
            warnings += ports_in_use({"bind": loaded.proxy.bind, "admin_bind": loaded.proxy.admin_bind})
        if live:
            from gorgo.cli.connectivity import find_all, reach_all

            found = find_all(loaded, environ=os.environ)
            fleet = found.merged(loaded).replicas
            sources = found.as_rows(time.monotonic())
            reached = reach_all(fleet, environ=os.environ, timeout_s=loaded.limits.connect_timeout_s)
            warnings += model_warnings(loaded, policies, {row.name: row.models for row in reached})
            advice = {row.name: several_addresses(row.addresses) for row in reached}
            warnings += [f"replica {name}: {words}" for name, words in advice.items() if words is not None]
    if as_json:
        replicas = [asdict(row) for row in reached]
        verdict = {"policy": name, "shared": shared, "warnings": warnings, "fleet_sources": sources}
        options.print_json({"config": str(config), **verdict, "replicas": replicas})
    else:
        n_replicas, n_sources, n_regions = (
            len(items(document.data, key)) for key in ("replicas", "fleet_sources", "regions")
        )
        shown = "policy unknown without its variables" if name is None else f"policy {name}"
        and_sources = f" and {counted(n_sources, 'fleet source')}" if n_sources else ""
        configured = f"{counted(n_replicas, 'replica')}{and_sources} in {counted(n_regions, 'region')}"
        typer.echo(f"{config}: ok, {configured}, {shown}")
        if shared is not None:
            typer.echo("  shared: router {router} of group {group}, store {url}".format_map(shared))
        for warning in warnings:
            typer.echo(f"  warning: {warning}")
        _print_sources(sources)
        _print_reached(reached)
    faults = []
    if down := sum(not row["up"] for row in sources):
        faults.append(f"{down} of {counted(len(sources), 'fleet source')} {'has' if down == 1 else 'have'} no result")
    if bad := sum(row.error is not None for row in reached):
        faults.append(f"{bad} of {counted(len(reached), 'replica')} cannot be reached")
    if faults:
        raise fail("; ".join(faults), code=FAILED)


def _print_sources(sources: Sequence[Mapping[str, Any]]) -> None:
    for row in sources:
        typer.echo(formatting.source_line(row))
        for problem in row["problems"]:
            typer.echo(f"  no replica of {problem}")


def _shared(config: Config) -> dict[str, str] | None:
    """Return the store and the group of the router's reports."""
    shared = config.shared
    if shared is None:
        return None
    from gorgo.live.peer_store.connection import router_name

    return {"url": shared.url, "group": shared.group, "router": router_name(shared)}


def _print_reached(reached: Sequence[Reached]) -> None:
    if reached:
        rows = [
            [
                *(row.name, row.region, row.url, row.rtt_ms, row.error or "reached", row.engine or "-"),
                first_names(row.models, MODELS_SHOWN) or "-",
            ]
            for row in reached
        ]
        typer.echo(table(["replica", "region", "url", "ms", "result", "engine", "models"], rows))
