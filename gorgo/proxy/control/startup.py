"""What a proxy starts with: the state file, the configuration, or some of each. Pure.

Owns the rule. Frozen weights hold, whatever the configuration says. What was set live (by an operator or a tuner) holds
as long as the configuration says what it said then; one that was edited since is newer, and wins. Each replica's drain
mark goes by the same rule. The version never goes back.
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
    """What to route by at first. `source` is a word for the log and the history of weights."""

    policy: Policy
    weights: Weights
    frozen: Frozen | None
    draining: frozenset[str]
    source: str


def initial_state(
    kept: PersistedState | None, config: Config, policy: Policy, weights: Weights | None, *, source: str = ""
) -> InitialState:
    """Choose between `kept` and the configuration's own `policy` and `weights` (its defaults if `None`).

    Raises `ConfigError`, which names `source`, where the policy that was kept is not there any more or does not have
    those weights: to route by another one in silence would be worse.
    """
    said = ConfigSnapshot.by(config)
    if weights is None:
        weights = Weights.of(policy.weight_specs, version=1)
    if kept is None:
        return InitialState(policy, weights, None, said.draining, "configuration")
    draining = _draining(kept, config, said)
    if kept.frozen is not None or _same(kept.configured, said, policy):
        return InitialState(*_live(kept, source), kept.frozen, draining, "state")
    same = (policy.name, dict(weights)) == (kept.policy, dict(kept.weights))
    version = kept.version if same else kept.version + 1
    return InitialState(policy, Weights(dict(weights), version), None, draining, "configuration")


def _live(kept: PersistedState, source: str) -> tuple[Policy, Weights]:
    try:
        policy = make_policy(kept.policy)
        # The box was minded, or widened, when they were set.
        return policy, Weights.of(policy.weight_specs, kept.weights, version=kept.version, allow_out_of_range=True)
    except (UnknownPolicy, WeightsError) as error:
        advice = "move the file away to start from the configuration"
        raise ConfigError(f"{source}: what it keeps in force cannot be had: {error}; {advice}") from error


def _same(before: ConfigSnapshot, now: ConfigSnapshot, policy: Policy) -> bool:
    if before.policy != now.policy:
        return False
    return _complete(before.weights, policy) == _complete(now.weights, policy)


def _complete(values: Mapping[str, float], policy: Policy) -> dict[str, float]:
    """With the defaults in place of what is not said: a weight that a new version of the policy brings is no edit."""
    return {spec.name: spec.default for spec in policy.weight_specs} | dict(values)


def _draining(kept: PersistedState, config: Config, said: ConfigSnapshot) -> frozenset[str]:
    marked = set(said.draining)
    for name in (replica.name for replica in config.replicas):
        if (name in kept.configured.draining) == (name in said.draining):
            marked = marked | {name} if name in kept.draining else marked - {name}
    return frozenset(marked)
