"""Policies that use neither load nor caches: `round-robin`, `random`, `nearest` and `simple-session-affinity`.

They are the controls of a comparison: each shows what one simple rule does alone.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import ClassVar

import numpy as np

from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.interface import Candidates, Choice, IndexKind, choose_min_cost, fill_unknown
from gorgo.core.policy.weights import Weights, WeightSpec
from gorgo.policies.base import rendezvous_scores


class RoundRobin:
    """The next name in alphabetical order after the last one chosen, from the start again at the end.

    The cursor is a name, not a position: replicas that join, leave or are ejected for a while do not shift the turn of
    the others.
    """

    name: ClassVar[str] = "round-robin"
    summary: ClassVar[str] = "one after another, by name"
    unit: ClassVar[str] = ""
    index: ClassVar[IndexKind] = "any"
    weight_specs: ClassVar[tuple[WeightSpec, ...]] = ()

    def __init__(self) -> None:
        self._last = ""

    def choose(
        self, request: RouteRequest, candidates: Candidates, weights: Weights, rng: np.random.Generator
    ) -> Choice:
        names = candidates.names
        following = [name for name in names if name > self._last]
        self._last = min(following or names)
        return Choice(names.index(self._last))


class Random:
    """The control of every comparison."""

    name: ClassVar[str] = "random"
    summary: ClassVar[str] = "any replica, each as likely"
    unit: ClassVar[str] = ""
    index: ClassVar[IndexKind] = "any"
    weight_specs: ClassVar[tuple[WeightSpec, ...]] = ()

    def choose(
        self, request: RouteRequest, candidates: Candidates, weights: Weights, rng: np.random.Generator
    ) -> Choice:
        return Choice(int(rng.integers(len(candidates))), uniform=True)


class Nearest:
    """Least smoothed round trip; ties go to the fewest in flight. An unknown one counts as the worst known."""

    name: ClassVar[str] = "nearest"
    summary: ClassVar[str] = "least round trip, ties to the fewest in flight"
    unit: ClassVar[str] = "ms"
    index: ClassVar[IndexKind] = "any"
    compares_all: ClassVar[bool] = True
    weight_specs: ClassVar[tuple[WeightSpec, ...]] = ()

    def choose(
        self, request: RouteRequest, candidates: Candidates, weights: Weights, rng: np.random.Generator
    ) -> Choice:
        return choose_min_cost({"rtt": fill_unknown(candidates.rtt_s) * 1e3}, candidates, rng)


class SimpleSessionAffinity:
    """Rendezvous hashing: the fixed salt of each replica is mixed with the key of the session; the greatest value wins.

    The key is the session id of the client, else the hash of the first 256 tokens. If a replica leaves, only its
    sessions move; they return with it.

    References
    ----------
    GORGO paper, baselines. Thaler and Ravishankar, Using name-based mappings to increase hit rates, 1998.
    """

    name: ClassVar[str] = "simple-session-affinity"
    summary: ClassVar[str] = "GORGO paper: rendezvous hash of the session id, else of the first 256 tokens"
    unit: ClassVar[str] = ""
    index: ClassVar[IndexKind] = "any"
    weight_specs: ClassVar[tuple[WeightSpec, ...]] = ()
    #: The key alone decides: commands warn of traces in which most requests have the same one.
    by_session: ClassVar[bool] = True

    def choose(
        self, request: RouteRequest, candidates: Candidates, weights: Weights, rng: np.random.Generator
    ) -> Choice:
        return Choice(int(rendezvous_scores(candidates.salt, _key(request)).argmax()))


def _key(request: RouteRequest) -> int:
    """Return 64 bits that name the session, in every process the same."""
    if request.session_id is None:
        return request.prefix_hash
    return int.from_bytes(blake2b(request.session_id.encode(), digest_size=8).digest(), "little")
