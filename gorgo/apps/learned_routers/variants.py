"""Policies of the comparisons by label: weights, settings of the training, and which guards are off.

Published systems run as published: nothing is queued at the router and nothing is hedged. `with queueing` beside a
label is the same policy with this project's queueing and hedging at the defaults of `gorgo serve`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gorgo.apps.simulate.run import policy_of
from gorgo.core.limits import HedgeLimits, OverloadLimits, RouterLimits
from gorgo.core.policy.interface import Policy
from gorgo.core.policy.weights import Weights
from gorgo.errors import UnknownPolicy
from gorgo.policies.learned.base import LearnedPolicy

#: The default of `overload.hedge_budget_ratio`.
HEDGE_BUDGET = 0.03
#: Added to a label.
QUEUEING = " with queueing"
#: More than any run here has open: a run at saturation drops nothing.
MAX_IN_FLIGHT = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to run a policy.

    Parameters
    ----------
    weights:
        Those that differ from the policy's defaults.
    training:
        Fields of the `TrainingSpec` that differ from the policy's own.
    trains_until:
        Share of the requests after which no further model is trained.
    trained_on:
        Name of a fleet: the model comes from a run on it, of the first phase of the same traffic, and is never
        replaced.
    shadow:
        Name of a policy that scores each decision, and learns if it can.
    queueing:
        Whether the router queues and hedges.
    """

    policy: str
    weights: tuple[tuple[str, float], ...] = ()
    training: tuple[tuple[str, Any], ...] = ()
    trains_until: float | None = None
    trained_on: str | None = None
    shadow: str | None = None
    queueing: bool = False

    def make(self) -> Policy:
        """Return a new instance."""
        policy = policy_of(self.policy)
        if not self.training:
            return policy
        assert isinstance(policy, LearnedPolicy), f"{self.policy} does not learn"
        return type(policy)(replace(policy.training, **dict(self.training)))

    def make_shadow(self) -> Policy | None:
        """Return a new instance of the shadow policy."""
        return None if self.shadow is None else policy_of(self.shadow)

    def weights_of(self, policy: Policy) -> Weights:
        return Weights.of(policy.weight_specs, dict(self.weights), version=1, allow_out_of_range=True)

    def limits(self, *, block_tokens: int, stale_after_s: float, requests: int) -> RouterLimits:
        """Return the Router's bounds; every decision of the run is retained."""
        return RouterLimits(
            block_tokens=float(block_tokens),
            stale_after_s=stale_after_s,
            max_in_flight=MAX_IN_FLIGHT,
            max_decisions=2 * requests,
            max_samples=0,
            overload=OverloadLimits(queue_enabled=self.queueing, queue_max_requests=MAX_IN_FLIGHT),
            hedging=HedgeLimits(budget_ratio=HEDGE_BUDGET if self.queueing else 0.0),
        )


def _tau(value: float) -> Variant:
    return Variant(policy="prefix-threshold", weights=(("tau", value),))


def _lodestar(**training: Any) -> Variant:
    return _trained_as("lodestar", **training)


def _trained_as(policy: str, **training: Any) -> Variant:
    return Variant(policy=policy, training=tuple(training.items()))


def _predicted(**weights: float) -> Variant:
    return Variant(policy="predicted-latency", weights=tuple(weights.items()))


#: Values of tau in the sweep.
TAUS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
#: Policies whose order of replicas is compared with the order of the measured first tokens.
SHADOWS = ("gorgo-ms", "gorgo-residual", "lodestar", "predicted-latency")
#: Variants whose label is not a policy's name.
VARIANTS: Mapping[str, Variant] = {
    "load-prefix 1:1:1": Variant(policy="load-prefix"),
    "load-prefix 3:2:2": Variant(policy="load-prefix", weights=(("prefix", 3.0), ("queue", 2.0), ("kv", 2.0))),
    **{f"tau {value:g}": _tau(value) for value in TAUS},
    **{f"random, shadow {name}": Variant(policy="random", shadow=name) for name in SHADOWS},
    "lodestar, frozen": Variant(policy="lodestar", trains_until=0.5),
    "lodestar, offline": Variant(policy="lodestar", trained_on="7xL20-8xA30"),
    "lodestar, new data only": _lodestar(replay_rule="none", fifo=1000),
    "lodestar, all data": _lodestar(replay_rule="all"),
    "lodestar, random replay": _lodestar(replay_rule="random"),
    "lodestar, linear": _lodestar(kind="linear"),
    "lodestar, model from 200 samples": _lodestar(first_samples=200),
    "lodestar, no range check": Variant(policy="lodestar", weights=(("range_check", 0.0),)),
    "lodestar, no exploration": Variant(policy="lodestar", weights=(("epsilon", 0.0),)),
    "lodestar, no K-filter": Variant(policy="lodestar", weights=(("k", 0.0),)),
    # Its published benchmark has these guards off.
    "lodestar, as in its benchmark": Variant(
        policy="lodestar", weights=(("range_check", 0.0), ("epsilon", 0.0), ("k", 0.0))
    ),
    "lodestar, near best 0.1": Variant(policy="lodestar", weights=(("delta", 0.1),)),
    "predicted-latency, no affinity gates": _predicted(affinity_first=0.0, affinity=0.0),
    "predicted-latency, no load gate": _predicted(max_penalty_s=0.0),
    "predicted-latency, no exploration": _predicted(epsilon=0.0),
    "predicted-latency, weighted pick": _predicted(weighted_pick=1.0),
    "predicted-latency, model from 1,000 samples": _trained_as("predicted-latency", first_samples=1000),
    "predicted-latency, round per 1,000": _trained_as("predicted-latency", round_samples=1000),
    "predicted-latency, logarithms": _trained_as("predicted-latency", target="log"),
    "predicted-latency, linear": _trained_as("predicted-latency", kind="rls"),
    "gorgo-residual, no range check": Variant(policy="gorgo-residual", weights=(("range_check", 0.0),)),
    "gorgo-residual, no limit": Variant(policy="gorgo-residual", weights=(("residual_limit", 1e9),)),
    "gorgo-residual, frozen": Variant(policy="gorgo-residual", trains_until=0.5),
    "gorgo-residual, offline": Variant(policy="gorgo-residual", trained_on="7xL20-8xA30"),
}


def find_variant(label: str) -> Variant:
    """Return the variant of a label; any policy's name is one.

    Example
    -------
    >>> find_variant("load-prefix 3:2:2 with queueing").queueing
    True
    """
    name = label.removesuffix(QUEUEING)
    try:
        variant = VARIANTS.get(name) or Variant(policy=policy_of(name).name)
    except UnknownPolicy as error:
        raise UnknownPolicy(f"no variant {label!r}; there are {', '.join(VARIANTS)}, and policies: {error}") from None
    return replace(variant, queueing=label.endswith(QUEUEING))
