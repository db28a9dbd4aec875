"""Policies of the comparisons by label: weights, settings of the training, source of cached tokens, guards.

Published systems run as published: nothing is queued at the router and nothing is hedged. `with queueing` beside a
label is the same policy with this project's queueing and hedging at the defaults of `gorgo serve`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from experiments.rules import IndexedPolicy
from gorgo.core.policy.interface import IndexKind, Policy
from gorgo.core.policy.weights import Weights
from gorgo.errors import UnknownPolicy
from gorgo.lab.sim.kv_events import CacheReports
from gorgo.lab.simulate.run import policy_of
from gorgo.policies.learned.base import LearnedPolicy

#: Added to a label.
QUEUEING = " with queueing"
#: Where the cached tokens of a decision come from. `unbounded`: dispatched prompts, never evicted. `bounded`: those
#: within each KV pool. `cached_tokens`: corrected by the engines' usage. `push` and `events`: reports. `exact`: the
#: engines' caches without delay.
Source = Literal["unbounded", "bounded", "cached_tokens", "push", "events", "exact"]
SOURCES: Mapping[Source, tuple[IndexKind, CacheReports]] = {
    "unbounded": ("published", "none"),
    "bounded": ("bounded", "none"),
    "cached_tokens": ("bounded", "usage"),
    "push": ("events", "push"),
    "events": ("events", "events"),
    "exact": ("events", "exact"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to run a policy."""

    policy: str
    weights: tuple[tuple[str, float], ...] = ()  #: Those that differ from the policy's defaults.
    training: tuple[tuple[str, Any], ...] = ()  #: Fields of the `TrainingSpec` that differ from the policy's own.
    trains_until: float | None = None  #: Share of the requests after which no further model is trained.
    #: Name of a fleet: the model comes from a run on it, of the first phase of the same traffic, and is never replaced.
    trained_on: str | None = None
    shadow: str | None = None  #: Name of a policy that scores each decision, and learns if it can.
    queueing: bool = False  #: Whether the router queues and hedges.
    source: Source | None = None  #: Of cached tokens; None: the policy's own, with the reports of the run.
    max_routes: int | None = None  #: Bound of the routes of `multi-depth`; None: the usual one.

    def make(self) -> Policy:
        policy = policy_of(self.policy)
        if self.training:
            assert isinstance(policy, LearnedPolicy), f"{self.policy} does not learn"
            policy = type(policy)(replace(policy.training, **dict(self.training)))
        if self.source is None or policy.index in ("any", SOURCES[self.source][0]):
            return policy
        return cast(Policy, IndexedPolicy(policy, SOURCES[self.source][0]))

    def make_shadow(self) -> Policy | None:
        return None if self.shadow is None else policy_of(self.shadow)

    def weights_of(self, policy: Policy) -> Weights:
        return Weights.of(policy.weight_specs, dict(self.weights), version=1, allow_out_of_range=True)


def _of(policy: str, **training: Any) -> Variant:
    return Variant(policy=policy, training=tuple(training.items()))


def _weighted(policy: str, **weights: float) -> Variant:
    return Variant(policy=policy, weights=tuple(weights.items()))


#: Values of tau in the sweep.
TAUS = (0.2, 0.4, 0.5, 0.6, 0.8)
#: Policies whose order of replicas is compared with the order of the measured first tokens.
SHADOWS = ("gorgo-residual", "lodestar", "predicted-latency")
#: Share of a run of 3,000 requests in which one model is trained.
FIRST_MODEL = 0.4
_UNBOUNDED = ("mooncake", "predicted-latency")
#: Variants whose label is not a policy's name.
VARIANTS: Mapping[str, Variant] = {
    "load-prefix 1:1:1": Variant(policy="load-prefix"),
    "load-prefix 3:2:2": _weighted("load-prefix", prefix=3.0, queue=2.0, kv=2.0),
    **{f"tau {value:g}": _weighted("prefix-threshold", tau=value) for value in TAUS},
    **{f"random, shadow {name}": Variant(policy="random", shadow=name) for name in SHADOWS},
    "lodestar, frozen": Variant(policy="lodestar", trains_until=0.5),
    "lodestar, offline": Variant(policy="lodestar", trained_on="7xL20-8xA30"),
    # As the paper compares buffers: each round's model is adopted, a worse one too.
    "lodestar, new data only": _of("lodestar", replay_rule="none", fifo=1000, judged=False),
    "lodestar, all data": _of("lodestar", replay_rule="all", judged=False),
    "lodestar, random replay": _of("lodestar", replay_rule="random", judged=False),
    "lodestar, linear": _of("lodestar", kind="linear"),
    "lodestar, model from 200 samples": _of("lodestar", first_samples=200),
    "lodestar, no range check": _weighted("lodestar", range_check=0.0),
    "lodestar, no exploration": _weighted("lodestar", epsilon=0.0),
    "lodestar, no K-filter": _weighted("lodestar", k=0.0),
    # Its published benchmark has these guards off.
    "lodestar, as in its benchmark": _weighted("lodestar", range_check=0.0, epsilon=0.0, k=0.0),
    "lodestar, near best 0.1": _weighted("lodestar", delta=0.1),
    # Its first model has seen the heuristic's decisions alone: as it decides without guards, and as it watches.
    "lodestar, first model alone": Variant(
        policy="lodestar", weights=(("range_check", 0.0), ("epsilon", 0.0), ("k", 0.0)), trains_until=FIRST_MODEL
    ),
    "prefix-cache-and-load, shadow lodestar's first model": Variant(
        policy="prefix-cache-and-load", shadow="lodestar", trains_until=FIRST_MODEL
    ),
    "predicted-latency, no affinity gates": _weighted("predicted-latency", affinity_first=0.0, affinity=0.0),
    "predicted-latency, no load gate": _weighted("predicted-latency", max_penalty_s=0.0),
    "predicted-latency, no exploration": _weighted("predicted-latency", epsilon=0.0),
    "predicted-latency, weighted pick": _weighted("predicted-latency", weighted_pick=1.0),
    "predicted-latency, model from 1,000 samples": _of("predicted-latency", first_samples=1000),
    "predicted-latency, round per 1,000": _of("predicted-latency", round_samples=1000),
    "predicted-latency, logarithms": _of("predicted-latency", target="log"),
    "predicted-latency, linear": _of("predicted-latency", kind="rls"),
    "gorgo-residual, no range check": _weighted("gorgo-residual", range_check=0.0),
    "gorgo-residual, no limit": _weighted("gorgo-residual", residual_limit=1e9),
    "multi-depth, single": _weighted("multi-depth", depths=2.0),
    # The post's router with one depth.
    "multi-depth, whole prompt": _weighted("multi-depth", depths=0.0),
    "longest prefix, exact caches": Variant(policy="prefix-cache-in-flight", source="exact"),
    "gorgo-ms, events": Variant(policy="gorgo-ms", source="events"),
    # Policies whose own index has no bound, with that of `gorgo-ms`.
    **{f"{name}, bounded index": Variant(policy=name, source="cached_tokens") for name in _UNBOUNDED},
    "load-prefix 3:2:2, bounded index": replace(
        _weighted("load-prefix", prefix=3.0, queue=2.0, kv=2.0), source="cached_tokens"
    ),
    "override off": _weighted("multi-depth", override=0.0),
    "override on": Variant(policy="multi-depth"),
    # Sources of `gorgo-ms` side by side.
    "history, unbounded": Variant(policy="gorgo-ms", source="unbounded"),
    "history, bounded": Variant(policy="gorgo-ms", source="bounded"),
    "history and cached_tokens": Variant(policy="gorgo-ms", source="cached_tokens"),
    "push": Variant(policy="gorgo-ms", source="push"),
    "events": Variant(policy="gorgo-ms", source="events"),
    "exact caches": Variant(policy="gorgo-ms", source="exact"),
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
