"""The initial state of a proxy: state file, configuration, or parts of both. Pure.

Frozen weights hold, whatever the configuration says; an edit waits for the end of the freeze. Live weights hold until
the configuration of policy or weights is edited: the edit is newer. Drain marks follow the same rule, per replica.
Versions never decrease.
"""

from __future__ import annotations

from dataclasses import dataclass

from gorgo.config.model import Config
from gorgo.core.policy.interface import Policy
from gorgo.core.policy.weights import Weights
from gorgo.errors import ConfigError, UnknownPolicy, WeightsError
from gorgo.live.control.file_routing import FileRouting, same_routing
from gorgo.live.control.state_file import ConfigSnapshot, Frozen, PersistedState
from gorgo.policies.registry import make_policy


@dataclass(frozen=True, slots=True)
class InitialState:
    """Policy, weights, freeze and drain marks at the start. `source` is for the log and the history."""

    policy: Policy
    weights: Weights
    frozen: Frozen | None
    draining: frozenset[str]
    source: str
    file: FileRouting


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
        return InitialState(policy, weights, None, config_state.draining, "configuration", FileRouting(config_state))
    draining = _draining(persisted, config, config_state)
    if persisted.frozen is not None or same_routing(persisted.configured, config_state, policy):
        file = FileRouting(persisted.configured).deferred(config, policy, weights)
        return InitialState(*_live(persisted, source), persisted.frozen, draining, "state", file)
    same = (policy.name, dict(weights)) == (persisted.policy, dict(persisted.weights))
    version = persisted.version if same else persisted.version + 1
    return InitialState(
        policy, Weights(dict(weights), version), None, draining, "configuration", FileRouting(config_state)
    )


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


def _draining(persisted: PersistedState, config: Config, config_state: ConfigSnapshot) -> frozenset[str]:
    marked = set(config_state.draining)
    for name in (replica.name for replica in config.replicas):
        if (name in persisted.configured.draining) == (name in config_state.draining):
            marked = marked | {name} if name in persisted.draining else marked - {name}
    return frozenset(marked)
