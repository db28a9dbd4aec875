"""Policy and weights of regions.yaml: those last applied, and an edit that waits for the end of a freeze. Pure.

The state file has the applied ones. A start therefore finds a waiting edit by the difference from regions.yaml.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gorgo.config.model import Config
from gorgo.core.policy.interface import Policy
from gorgo.core.policy.weights import Weights
from gorgo.live.control.state_file import ConfigSnapshot


@dataclass(frozen=True, slots=True)
class PendingEdit:
    """An edit of policy or weights, and the shadow policy that was checked with it."""

    policy: Policy
    weights: Weights
    shadow: str | None = None


@dataclass(frozen=True, slots=True)
class FileRouting:
    """The applied configuration, and the edit that is not."""

    applied: ConfigSnapshot
    pending: PendingEdit | None = None

    def deferred(self, config: Config, policy: Policy, weights: Weights) -> FileRouting:
        """Return this with the file's policy and weights as the waiting edit; without one if they are the applied."""
        edited = ConfigSnapshot.by(config)
        applied = replace(edited, policy=self.applied.policy, weights=self.applied.weights)
        if same_routing(applied, edited, policy):
            return FileRouting(applied)
        return FileRouting(applied, PendingEdit(policy, weights, config.proxy.shadow_policy))

    def unedited(self, config: Config) -> FileRouting:
        """Return this after a reload that changed neither policy nor weights."""
        applied = replace(ConfigSnapshot.by(config), policy=self.applied.policy, weights=self.applied.weights)
        pending = self.pending and replace(self.pending, shadow=config.proxy.shadow_policy)
        return FileRouting(applied, pending)

    def released(self) -> FileRouting:
        """Return this with the waiting edit applied."""
        if self.pending is None:
            return self
        edit = self.pending
        return FileRouting(replace(self.applied, policy=edit.policy.name, weights=dict(edit.weights)))


def same_routing(before: ConfigSnapshot, now: ConfigSnapshot, policy: Policy) -> bool:
    """Return whether two configurations have equal policies and weights; `policy` is that of `now`."""
    if before.policy != now.policy:
        return False
    return _complete(before.weights, policy) == _complete(now.weights, policy)


def _complete(values: Mapping[str, float], policy: Policy) -> dict[str, float]:
    """Return `values` with defaults for missing weights: a weight that is new in the policy is not an edit."""
    return {spec.name: spec.default for spec in policy.weight_specs} | dict(values)
