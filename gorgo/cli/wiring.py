"""A policy with its weights, from regions.yaml, the options and a weights file.

Which wins: `--policy` before the weights file before regions.yaml. Weights belong to the policy they were written for:
those of regions.yaml are used only with its own policy, and a weights file for another policy than `--policy` is an
error, never ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gorgo.config.model import Config
from gorgo.core.policy import Policy
from gorgo.core.weights import Weights
from gorgo.errors import ConfigError, UnknownPolicy, WeightsError
from gorgo.policies.registry import make_policy

#: Four weights take 100 bytes.
MAX_WEIGHTS_FILE_BYTES = 65_536


def compose_policy(
    config: Config, *, source: Path, policy: str | None = None, weights_file: Path | None = None
) -> tuple[Policy, Weights]:
    """The policy to serve with and its weights at version 1; `source` names the configuration in errors."""
    if weights_file is not None:
        named, values = read_weights_file(weights_file)
        if policy is not None and policy != named:
            raise ConfigError(f"{weights_file}: weights are for the policy {named!r}, not for {policy!r} of --policy")
        return _weighted(named, values, where=str(weights_file))
    name = policy or config.proxy.policy
    if name != config.proxy.policy:
        return _weighted(name, {}, where="--policy")
    return _weighted(name, config.proxy.weights, where=f"{source}: proxy.policy and proxy.weights")


def read_weights_file(path: Path) -> tuple[str, Mapping[str, float]]:
    """Policy and weights of a file `{"policy": "gorgo", "weights": {"w_rtt": 0.5}}`; raises `ConfigError`."""
    expected = '{"policy": "NAME", "weights": {"NAME": NUMBER, ...}}'
    try:
        with path.open("rb") as file:
            content: Any = json.loads(file.read(MAX_WEIGHTS_FILE_BYTES + 1))
    except (OSError, ValueError, RecursionError) as error:  # too deep for the JSON parser is RecursionError
        raise ConfigError(f"{path}: cannot be read as weights ({error}); expected {expected}") from error
    if not isinstance(content, dict) or set(content) != {"policy", "weights"}:
        raise ConfigError(f"{path}: expected {expected}")
    name, values = content["policy"], content["weights"]
    if not isinstance(name, str) or not isinstance(values, dict) or not all(map(_is_number, values.values())):
        raise ConfigError(f"{path}: expected {expected}")
    return name, values


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _weighted(name: str, values: Mapping[str, float], *, where: str) -> tuple[Policy, Weights]:
    try:
        policy = make_policy(name)
        return policy, Weights.of(policy.weight_specs, values, version=1)
    except (UnknownPolicy, WeightsError) as error:
        raise ConfigError(f"{where}: {error}") from error
