"""`gorgo check`: whether regions.yaml is valid and its replicas answer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from gorgo.cli import options
from gorgo.cli.errors import FAILED, fail
from gorgo.cli.tables import table

if TYPE_CHECKING:
    from gorgo.cli.connectivity import Reached


def check(
    config: options.Config = options.REGIONS_YAML,
    live: Annotated[bool, typer.Option("--live", help="Also send a request to every replica.")] = False,
    as_json: options.Json = False,
) -> None:
    """Validate regions.yaml.

    Lists every error with its key, line and value; warns of a url with a path and of one used twice. With --live the
    command also sends a request to every replica; the exit code is 1 if one does not answer with 2xx.
    """
    from gorgo.cli.connectivity import reach_all
    from gorgo.cli.policy_setup import compose_policy
    from gorgo.config.load import load_config
    from gorgo.config.replica_advice import url_warnings
    from gorgo.sim.engine.profiles import find_profile

    loaded = load_config(config)
    policy, _ = compose_policy(loaded, source=config)
    find_profile(loaded.simulation.profile)
    reached = reach_all(loaded.replicas, environ=os.environ, timeout_s=loaded.limits.connect_timeout_s) if live else []
    warnings = url_warnings(loaded.replicas)
    if as_json:
        replicas = [asdict(row) for row in reached]
        answer = {"config": str(config), "policy": policy.name, "warnings": warnings, "replicas": replicas}
        options.print_json(answer)
    else:
        size = f"{len(loaded.replicas)} replicas in {len(loaded.regions)} regions"
        typer.echo(f"{config}: ok, {size}, policy {policy.name}")
        for warning in warnings:
            typer.echo(f"  warning: {warning}")
        _print_reached(reached)
    bad = sum(row.error is not None for row in reached)
    if bad:
        raise fail(f"{bad} of {len(reached)} replicas cannot be reached", code=FAILED)


def _print_reached(reached: Sequence[Reached]) -> None:
    if reached:
        rows = [[row.name, row.region, row.url, row.rtt_ms, row.error or "reached"] for row in reached]
        typer.echo(table(["replica", "region", "url", "ms", "result"], rows))
