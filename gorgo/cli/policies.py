"""`gorgo policies`: the routing policies and their weights."""

from __future__ import annotations

from typing import Any

import typer

from gorgo.cli import options
from gorgo.cli.tables import table


def policies(as_json: options.Json = False) -> None:
    """List the routing policies.

    Each has the unit of its cost, its prefix index, and its weights with defaults and bounds.
    """
    from gorgo.policies.registry import make_policy, policy_names

    made = [make_policy(name) for name in policy_names()]
    if as_json:
        options.print_json([_policy_row(policy) for policy in made])
        return
    rows = [[policy.name, policy.unit or None, policy.index, _weights(policy), policy.summary] for policy in made]
    typer.echo(table(["policy", "unit", "index", "weights", "rule"], rows))


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
