"""Commands that look and change nothing: is the configuration right, which policies are there, how is the fleet."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gorgo.cli import options
from gorgo.cli.errors import FAILED, fail
from gorgo.cli.tables import table

if TYPE_CHECKING:
    from gorgo.cli.connectivity import Reached

#: What `gorgo status` asks for.
STATUS_PATH = "/admin/status"


def check(
    config: options.Config = options.REGIONS_YAML,
    live: Annotated[bool, typer.Option("--live", help="Also reach every replica.")] = False,
    as_json: options.Json = False,
) -> None:
    """Validate regions.yaml.

    Everything wrong with it is listed with its place, line and value. With --live every replica is reached as well,
    and the exit code is 1 if one is not.
    """
    from gorgo.cli.connectivity import reach_all
    from gorgo.cli.policy_setup import compose_policy
    from gorgo.config.load import load_config
    from gorgo.sim.engine.profiles import find_profile

    loaded = load_config(config)
    policy, _ = compose_policy(loaded, source=config)
    find_profile(loaded.simulation.profile)
    reached = reach_all(loaded.replicas, environ=os.environ, timeout_s=loaded.limits.connect_timeout_s) if live else []
    if as_json:
        replicas = [asdict(row) for row in reached]
        options.print_json({"config": str(config), "policy": policy.name, "replicas": replicas})
    else:
        size = f"{len(loaded.replicas)} replicas in {len(loaded.regions)} regions"
        typer.echo(f"{config}: ok, {size}, policy {policy.name}")
        _print_reached(reached)
    bad = sum(row.error is not None for row in reached)
    if bad:
        raise fail(f"{bad} of {len(reached)} replicas cannot be reached", code=FAILED)


def policies(as_json: options.Json = False) -> None:
    """List the routing policies.

    With the unit of their cost, the prefix index they want, and their weights with their boxes.
    """
    from gorgo.policies.registry import make_policy, policy_names

    made = [make_policy(name) for name in policy_names()]
    if as_json:
        options.print_json([_policy_row(policy) for policy in made])
        return
    rows = [[policy.name, policy.unit or None, policy.index, _weights(policy), policy.summary] for policy in made]
    typer.echo(table(["policy", "unit", "index", "weights", "rule"], rows))


def status(
    url: options.AdminUrl = options.ADMIN_URL,
    watch: Annotated[bool, typer.Option("--watch", help="Look again every two seconds, until Ctrl-C.")] = False,
    as_json: options.Json = False,
) -> None:
    """Show the fleet as the proxy sees it.

    What is wrong, the fleet by region, the last decisions with every candidate's terms, and the weights with their
    history; `-` is unknown or stale. The last line says which weights are in force, and whether they are frozen. The
    same is on the proxy's status page. With --watch, --json is a line per look.
    """
    from gorgo.cli.admin_call import as_expected, call_admin
    from gorgo.cli.status.watch import show_status, watch_status

    token = options.admin_token()
    with as_expected(url):
        if watch:
            watch_status(url, token, as_json=as_json)
            return
        shown = call_admin("GET", url, STATUS_PATH, token)
        if as_json:
            options.print_json(shown)
        else:
            show_status(shown)


def _print_reached(reached: Sequence[Reached]) -> None:
    if reached:
        rows = [[row.name, row.region, row.url, row.rtt_ms, row.error or "reached"] for row in reached]
        typer.echo(table(["replica", "region", "url", "ms", "result"], rows))


def _policy_row(policy: Any) -> dict[str, Any]:
    specs = policy.weight_specs
    weights = [{"name": s.name, "default": s.default, "low": s.low, "high": s.high} for s in specs]
    return {
        "name": policy.name,
        "summary": policy.summary,
        "unit": policy.unit,
        "index": policy.index,
        "weights": weights,
    }


def _weights(policy: Any) -> str | None:
    words = [f"{s.name}={s.default:g} [{s.low:g}, {s.high:g}]" for s in policy.weight_specs]
    return ", ".join(words) or None
