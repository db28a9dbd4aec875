"""`gorgo scenarios`, `gorgo profiles` and `gorgo fleets`: what simulations can run with."""

from __future__ import annotations

from dataclasses import asdict

import typer

from gorgo.cli import options
from gorgo.cli.tables import Cell, table


def scenarios(as_json: options.Json = False) -> None:
    """List the scenarios of `gorgo simulate --scenario`."""
    from gorgo.sim.faults.scenarios import SCENARIOS

    if as_json:
        options.print_json([{"name": one.name, "description": one.description} for one in SCENARIOS.values()])
        return
    typer.echo(table(["scenario", "what happens"], [[one.name, one.description] for one in SCENARIOS.values()]))


def fleets(as_json: options.Json = False) -> None:
    """List the fleets of `--fleet`, the router told the truth about every engine."""
    from gorgo.sim.named_fleets import FLEETS

    if as_json:
        rows = [{"name": one.name, "description": one.description, **asdict(one.fleet())} for one in FLEETS.values()]
        options.print_json(rows)
        return
    typer.echo(table(["fleet", "engines and links"], [[one.name, one.description] for one in FLEETS.values()]))


def profiles(as_json: options.Json = False) -> None:
    """List the engine profiles for `simulation.profile` of regions.yaml.

    With --json, also the coefficients of each and their source.
    """
    from gorgo.sim.engine.profiles import PROFILES

    if as_json:
        options.print_json([asdict(one) for one in PROFILES.values()])
        return
    header = ["profile", "estimate", "prefill tokens/s", "ms per token alone", "kv tokens", "batch", "context"]
    rows: list[list[Cell]] = [
        [
            one.name,
            "yes" if one.is_estimate else "",
            round(one.prefill_tokens_per_s),
            one.decode_s(1, 0) * 1e3,
            one.kv_tokens,
            one.max_running_requests,
            one.context_tokens,
        ]
        for one in PROFILES.values()
    ]
    typer.echo(table(header, rows))
