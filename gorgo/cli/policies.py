"""`gorgo policies`, and the policy with its weights that a command runs with.

Owns the list of policies as text, and which of regions.yaml, the options and a weights file a policy and its weights
are taken from (`compose_policy`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from gorgo.cli import options
from gorgo.cli.tables import table
from gorgo.config.model import Config
from gorgo.config.weights_file import read_weights_file
from gorgo.core.policy.interface import Policy
from gorgo.core.policy.weights import Weights
from gorgo.errors import ConfigError, UnknownPolicy, WeightsError
from gorgo.policies.registry import make_policy, make_shadow


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


# Precedence: `--policy`, the weights file, regions.yaml. Weights belong to one policy: those of regions.yaml apply to
# its own policy only, and a weights file for another policy than `--policy` is an error.


def compose_policy(
    config: Config, *, source: Path, policy: str | None = None, weights_file: Path | None = None
) -> tuple[Policy, Weights]:
    """Return the policy and its weights at version 1; `source` names the configuration in errors.

    Also checks that the configured shadow policy fits the policy.
    """
    found = _compose(config, source=source, policy=policy, weights_file=weights_file)
    try:
        make_shadow(config.proxy.shadow_policy, found[0])
    except (UnknownPolicy, ConfigError) as error:
        raise ConfigError(f"{source}: proxy.shadow_policy: {error}") from error
    return found


def _compose(config: Config, *, source: Path, policy: str | None, weights_file: Path | None) -> tuple[Policy, Weights]:
    if weights_file is not None:
        file = read_weights_file(weights_file)
        if policy is not None and policy != file.policy:
            raise ConfigError(
                f"{weights_file}: weights are for the policy {file.policy!r}, not for {policy!r} of --policy"
            )
        return _weighted(file.policy, file.weights, where=str(weights_file), allow_out_of_range=file.widened)
    name = policy or config.proxy.policy
    if name != config.proxy.policy:
        return _weighted(name, {}, where="--policy")
    return _weighted(name, config.proxy.weights, where=f"{source}: proxy.policy and proxy.weights")


def _weighted(
    name: str, values: Mapping[str, float], *, where: str, allow_out_of_range: bool = False
) -> tuple[Policy, Weights]:
    try:
        policy = make_policy(name)
        return policy, Weights.of(policy.weight_specs, values, version=1, allow_out_of_range=allow_out_of_range)
    except (UnknownPolicy, WeightsError) as error:
        raise ConfigError(f"{where}: {error}") from error
