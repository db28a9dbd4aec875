"""The initial state of a proxy: state file, configuration, or parts of both. Pure.

Frozen weights hold, whatever the configuration says. Live weights hold until the configuration of
policy or weights is edited: the edit is newer. Drain marks follow the same rule, per replica. Versions never decrease.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gorgo.config.model import Config
from gorgo.core.policy.interface import Policy
from gorgo.core.policy.weights import Weights
from gorgo.errors import ConfigError, UnknownPolicy, WeightsError
from gorgo.policies.registry import make_policy
from gorgo.proxy.control.state_file import ConfigSnapshot, Frozen, PersistedState


@dataclass(frozen=True, slots=True)
class InitialState:
    """Policy, weights, freeze and drain marks at the start. `source` is for the log and the history."""

    policy: Policy
    weights: Weights
    frozen: Frozen | None
    draining: frozenset[str]
    source: str


def initial_state(
    persisted: PersistedState | None, config: Config, policy: Policy, weights: Weights | None, *, source: str = ""
) -> InitialState:
    """Choose between the state file and the configuration's `policy` and `weights` (its defaults if `None`).

    Raises `ConfigError`, naming `source`, if the persisted policy is unknown or does not have those weights.
    """
    config_state = ConfigSnapshot.by(config)
    if weights is None:
        weights = Weights.of(policy.weight_specs, version=1)
    if persisted is None:
        return InitialState(policy, weights, None, config_state.draining, "configuration")
    draining = _draining(persisted, config, config_state)
    if persisted.frozen is not None or _same(persisted.configured, config_state, policy):
        return InitialState(*_live(persisted, source), persisted.frozen, draining, "state")
    same = (policy.name, dict(weights)) == (persisted.policy, dict(persisted.weights))
    version = persisted.version if same else persisted.version + 1
    return InitialState(policy, Weights(dict(weights), version), None, draining, "configuration")


def _live(persisted: PersistedState, source: str) -> tuple[Policy, Weights]:
    try:
        policy = make_policy(persisted.policy)
        # Their range was checked when they were set.
        return policy, Weights.of(
            policy.weight_specs, persisted.weights, version=persisted.version, allow_out_of_range=True
        )
    except (UnknownPolicy, WeightsError) as error:
        advice = "move the file away to start from the configuration"
        raise ConfigError(f"{source}: its policy or weights are invalid: {error}; {advice}") from error


def _same(before: ConfigSnapshot, now: ConfigSnapshot, policy: Policy) -> bool:
    if before.policy != now.policy:
        return False
    return _complete(before.weights, policy) == _complete(now.weights, policy)


def _complete(values: Mapping[str, float], policy: Policy) -> dict[str, float]:
    """Return `values` with defaults for missing weights: a weight that is new in the policy is not an edit."""
    return {spec.name: spec.default for spec in policy.weight_specs} | dict(values)


def _draining(persisted: PersistedState, config: Config, config_state: ConfigSnapshot) -> frozenset[str]:
    marked = set(config_state.draining)
    for name in (replica.name for replica in config.replicas):
        if (name in persisted.configured.draining) == (name in config_state.draining):
            marked = marked | {name} if name in persisted.draining else marked - {name}
    return frozenset(marked)
