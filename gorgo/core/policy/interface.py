"""The policy interface: a name, a unit, weights, the kind of prefix index, and one plain function that chooses."""

from __future__ import annotations

from typing import ClassVar, Literal, Protocol, runtime_checkable

import numpy as np

from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.candidates import Candidates
from gorgo.core.policy.choice import Choice
from gorgo.core.policy.weights import Weights, WeightSpec

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


def hashed_block_sizes(*policies: object) -> frozenset[int]:
    """Return the block sizes that policies read."""
    return frozenset(policy.hashed_block_tokens for policy in policies if isinstance(policy, HashesBlocks))
