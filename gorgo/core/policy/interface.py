"""The policy interface: a name, a unit, weights, the kind of prefix index, and one plain function that chooses.

Owns the protocols, and the shadow policy that scores decisions without changing them (`Shadow`). Leaves the policies to
`gorgo.policies`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, runtime_checkable

import numpy as np

from gorgo.core.messages.decision import ShadowScore
from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.candidates import Candidates
from gorgo.core.policy.choice import TIE_EPSILON, Choice
from gorgo.core.policy.weights import Weights, WeightSpec
from gorgo.errors import ConfigError

#: `published`: no bound per replica and no correction by reports, as the papers have it (the global bound protects
#: memory only); failed attempts and restarts are forgotten, which the papers do not.
#: `bounded`: leaf-first LRU within each replica's KV capacity. `events`: `bounded`, and reports of the engine's cache
#: (KV events, pushes) in its place where a replica has them. `any`: the policy does not read the index.
IndexKind = Literal["published", "bounded", "events", "any"]


@runtime_checkable
class Policy(Protocol):
    """Scores and picks; never filters, reserves or waits.

    An instance belongs to one Router and may keep state of its own (a round-robin cursor). `candidates` has at least
    one row. `rng` is the only source of chance.
    """

    name: ClassVar[str]
    #: One line for the table of policies: source and rule.
    summary: ClassVar[str]
    #: Unit of the cost and its terms; "" for a policy without a cost.
    unit: ClassVar[str]
    weight_specs: ClassVar[tuple[WeightSpec, ...]]
    index: ClassVar[IndexKind]

    def choose(
        self, request: RouteRequest, candidates: Candidates, weights: Weights, rng: np.random.Generator
    ) -> Choice: ...


@runtime_checkable
class HashesBlocks(Protocol):
    """A policy that reads `RouteRequest.kv_hashes` of one block size, also where no engine reports its cache."""

    hashed_block_tokens: ClassVar[int]


@dataclass(frozen=True, slots=True)
class RouteStats:
    """The routes of a policy that learns them (`HasRoutes`), by origin: `local`, or other routers' (`remote`).

    Parameters
    ----------
    max_routes, ttl_s:
        Bound of all routes, and the time without use after which one is void, s.
    routes:
        Stored ones.
    unused_s:
        How long the longest unused one has not been used, s; without an origin that has none.
    evicted:
        Routes that had no place, so far.
    """

    max_routes: int
    ttl_s: float
    routes: Mapping[str, int]
    unused_s: Mapping[str, float]
    evicted: Mapping[str, int]


@runtime_checkable
class HasRoutes(Protocol):
    """A policy that stores routes of prefixes, within bounds of the Router's limits."""

    def set_route_limits(self, max_routes: int, ttl_s: float) -> None: ...

    def route_stats(self, *, now: float) -> RouteStats: ...


def takes_objectives(policy: object) -> bool:
    """Return whether a policy steers by `RouteRequest.slo_ttft_s`, which is then an objective and no deadline."""
    return getattr(policy, "takes_objectives", False) is True


def hashed_block_sizes(*policies: object) -> frozenset[int]:
    """Return the block sizes that policies read."""
    return frozenset(policy.hashed_block_tokens for policy in policies if isinstance(policy, HashesBlocks))


# The shadow policy: scores each decision and changes none, so that its ordering is measured on live traffic.
#
# Owns its scores, and which index two policies can share. See `lab.rank` for scores against measured first tokens.
#
# Theory of operation. Under a policy that routes at random, a shadow's rank of the chosen replica is independent of
# everything else, so the time to first token by rank says whether the shadow orders replicas rightly (the validation
# of the GORGO paper). The shadow sees the very candidates that were chosen from, and draws from a generator of its
# own, so that nothing is decided differently for its being there.


class Shadow:
    """A policy that scores and does not route, with its own default weights.

    Parameters
    ----------
    policy:
        A new instance, checked by `validate_shadow`.
    rng:
        Its own.
    """

    __slots__ = ("_rng", "_weights", "policy")

    def __init__(self, policy: Policy, rng: np.random.Generator) -> None:
        self.policy = policy
        self._weights = Weights.of(policy.weight_specs)
        self._rng = rng

    def choose(self, request: RouteRequest, candidates: Candidates) -> Choice:
        """Return the choice that it would have made."""
        return self.policy.choose(request, candidates, self._weights, self._rng)

    def score(self, choice: Choice, row: int) -> ShadowScore:
        """Return the score of the candidate in `row` by its own choice."""
        if choice.cost is None:
            return ShadowScore(self.policy.name, None, None, None)
        cost = float(choice.cost[row])
        rank = 1 + int(np.count_nonzero(choice.cost < cost - TIE_EPSILON)) if len(choice.cost) > 1 else None
        predicted_s = None if choice.predict is None else choice.predict(row)
        return ShadowScore(self.policy.name, rank, cost, predicted_s)


def validate_shadow(policy: Policy, shadow: Policy) -> None:
    """Raise `ConfigError` if `shadow` cannot score the decisions of `policy`."""
    if not shadow.unit:
        raise ConfigError(f"shadow policy {shadow.name!r} has no cost to rank replicas by; expected one that has")
    required_index(policy, shadow)


def required_index(policy: Policy, shadow: Policy | None) -> IndexKind:
    """Return the prefix index of both. Raise `ConfigError` if each reads another kind."""
    wanted = {other.index: other.name for other in (policy, shadow) if other is not None and other.index != "any"}
    if len(wanted) > 1:
        indexes = ", ".join(f"{name!r} the {kind} one" for kind, name in wanted.items())
        raise ConfigError(
            f"shadow policy and policy read different prefix indexes ({indexes}), and there is one; "
            "expected a pair of one kind, or a policy that reads none (random, round-robin)"
        )
    return next(iter(wanted), "published")
