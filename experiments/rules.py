"""Policies that no registry has: a rule of another router, and policies around a policy, which change or audit it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.interface import Candidates, Choice, IndexKind, Policy, choose_min_cost
from gorgo.core.policy.weights import Weights, WeightSpec
from gorgo.core.record import record
from gorgo.lab.sim.engine.kv_cache import BlockPool, KvCache
from gorgo.lab.sim.faults import EngineObserver, EngineView


class DynamoKv:
    """cost = tokens to prefill there, this prompt's included, + tokens of all prompts there, in tokens.

    The cost of NVIDIA Dynamo's KV router with its defaults (an overlap weight of 1, a temperature of 0), which counts
    blocks and, of what decodes, each shared block once.
    """

    name: ClassVar[str] = "Dynamo's KV rule"
    summary: ClassVar[str] = "tokens to prefill + tokens in flight"
    unit: ClassVar[str] = "tokens"
    index: ClassVar[IndexKind] = "events"
    weight_specs: ClassVar[tuple[WeightSpec, ...]] = ()

    def choose(
        self,
        request: RouteRequest,  # noqa: ARG002 - the interface
        candidates: Candidates,
        weights: Weights,  # noqa: ARG002
        rng: np.random.Generator,
    ) -> Choice:
        prefill = candidates.queued_prefill_tokens + candidates.uncached_tokens
        return choose_min_cost({"prefill": prefill, "decode": candidates.in_flight_tokens}, candidates, rng)


class IndexedPolicy:
    """The policy with `index` for its own kind: a compiled policy's attributes cannot be replaced."""

    def __init__(self, policy: Policy, index: IndexKind) -> None:
        self._policy = policy
        self.name, self.summary, self.unit = policy.name, policy.summary, policy.unit
        self.weight_specs, self.index = policy.weight_specs, index

    def __getattr__(self, name: str) -> Any:
        """Return what some policies have beside the interface (`compares_all`, `reads_progress`)."""
        if name.startswith("_"):  # a copy in the making has no policy yet
            raise AttributeError(name)
        return getattr(self._policy, name)

    def choose(
        self, request: RouteRequest, candidates: Candidates, weights: Weights, rng: np.random.Generator
    ) -> Choice:
        return self._policy.choose(request, candidates, weights, rng)


class ShortSightedPolicy(IndexedPolicy):
    """The policy where nobody went on from a prompt and nothing is ever found again: without `room` and `shared`."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy, policy.index)

    def choose(
        self, request: RouteRequest, candidates: Candidates, weights: Weights, rng: np.random.Generator
    ) -> Choice:
        return self._policy.choose(request, replace(candidates, shared=None, found_share=0.0), weights, rng)


@record
class AuditedDecision:
    """Tokens of one decision summed over the candidates.

    A prompt that was sent and is not computed yet is estimated and not cached.
    """

    at_s: float
    phantom_tokens: float  #: Estimated and not cached.
    missed_tokens: float  #: Cached and not estimated.
    cached_tokens: float
    estimated_tokens: float


class AuditedPolicy(EngineObserver):
    """A policy whose view of cached tokens is compared with the engines' own caches, on every replica.

    It decides as without the audit.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._engines: Mapping[str, EngineView] = {}
        self.decisions: list[AuditedDecision] = []
        self.name, self.summary, self.unit = policy.name, policy.summary, policy.unit
        self.weight_specs, self.index = policy.weight_specs, policy.index

    def observe(self, engines: Mapping[str, EngineView]) -> None:
        self._engines = engines

    def choose(
        self, request: RouteRequest, candidates: Candidates, weights: Weights, rng: np.random.Generator
    ) -> Choice:
        estimated = candidates.cached_tokens
        cached = np.array([self._cached_tokens(name, request) for name in candidates.names])
        excess = estimated - cached
        audited = AuditedDecision(
            at_s=candidates.now, phantom_tokens=float(excess[excess > 0].sum()),
            missed_tokens=float(-excess[excess < 0].sum()), cached_tokens=float(cached.sum()),
            estimated_tokens=float(estimated.sum()),
        )  # fmt: skip
        self.decisions.append(audited)
        return self._policy.choose(request, candidates, weights, rng)

    def _cached_tokens(self, replica: str, request: RouteRequest) -> float:
        cache: Any = self._engines[replica].model.cache
        if isinstance(cache, BlockPool):
            return float(len(cache.find(cache.contents(request.blocks))) * cache.unit_tokens)
        assert isinstance(cache, KvCache), "there are two kinds"
        return float(cache.match(request.blocks).items * cache.item_tokens)
