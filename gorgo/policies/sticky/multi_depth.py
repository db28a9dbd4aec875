"""`multi-depth`: the replica that served the longest part of a prompt, learned at several depths from answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from gorgo.core.arrays import Floats
from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.candidates import Candidates
from gorgo.core.policy.choice import Choice
from gorgo.core.policy.interface import IndexKind
from gorgo.core.policy.weights import Weights, WeightSpec
from gorgo.core.prefix.origin import Origin
from gorgo.policies.base import least_loaded
from gorgo.policies.sticky.placement import bounded_load, jump_hash, two_choices
from gorgo.policies.sticky.prefixes import ALIGNED_TOKENS, Prefix, even_prefixes, prefixes_of, remote_prefixes
from gorgo.policies.sticky.routes import RouteTable


class MultiDepth:
    """The longest match among routes learned from answers; a hash of the prompt's beginning without one.

    Theory of operation. A completed attempt leaves a route at the end of each message of its prompt, so a later prompt
    that shares only the beginning finds its replica. A prompt without messages has one every 128 tokens, and so have
    the routes of other routers. If that replica has far more requests than the median, the least loaded
    serves. The route still names the replica of the match or of the hash: a diversion is temporary, and learning it
    would move prefixes to and fro.

    References
    ----------
    Ranvier, multi-depth prefix routing.
    """

    name: ClassVar[str] = "multi-depth"
    summary: ClassVar[str] = (
        "Ranvier: the replica of the longest prefix answered before, by routes at several depths; else by a hash; the "
        "least loaded above twice the median load"
    )
    unit: ClassVar[str] = ""
    index: ClassVar[IndexKind] = "any"
    hashed_block_tokens: ClassVar[int] = ALIGNED_TOKENS
    weight_specs: ClassVar[tuple[WeightSpec, ...]] = (
        WeightSpec(
            "depths",
            1.0,
            0.0,
            1.0,
            "1: a route at the end of each message, else every 128 tokens; 0: at the deepest alone",
            tunable="no",
        ),
        WeightSpec(
            "miss",
            0.0,
            0.0,
            3.0,
            "without a route: 0 bounded-load hash, 1 the better of two, 2 jump hash, 3 hash modulo replicas",
            tunable="no",
        ),
        WeightSpec("load_factor", 1.25, 1.0, 10.0, "bound of `miss` 0, in mean loads", tunable="no"),
        WeightSpec("bias", 2.0, 0.0, 1000.0, "requests by which the second of `miss` 1 must be better", tunable="no"),
        WeightSpec(
            "override", 2.0, 0.0, 100.0, "median loads above which the least loaded serves; 0: off", tunable="no"
        ),
        WeightSpec("margin", 2.0, 0.0, 1000.0, "requests added to that bound", tunable="no"),
    )

    def __init__(self) -> None:
        self.routes = RouteTable()

    def choose(
        self,
        request: RouteRequest,
        candidates: Candidates,
        weights: Weights,
        rng: np.random.Generator,
    ) -> Choice:
        load = candidates.in_flight_requests
        prefixes = prefixes_of(request)
        matched = np.zeros(len(candidates))
        fallback = None
        found = self._longest(self._with_remote(request, prefixes), candidates)
        if found is None:
            row, fallback = _place(_prompt_hash(request), candidates, weights), "no_match"
        else:
            row, matched[found[0]] = found
        first_chosen = candidates.names[row]
        learned = prefixes if weights["depths"] >= 1.0 else prefixes[-1:]
        if _is_overloaded(row, load, weights):
            row, fallback = least_loaded(candidates, rng), "overloaded"

        def learn(now: float) -> None:
            for prefix in learned:
                self.routes.set_route(prefix.key, first_chosen, Origin.LOCAL, now=now)

        terms = {"route_tokens": matched, "in_flight": load.copy()}
        return Choice(row, terms, fallback=fallback, learn=learn if prefixes else None)

    def add_remote_route(self, model: str | None, prefix: bytes, replica: str, *, now: float) -> None:
        """Add the route of a prefix that another router had answered."""
        self.routes.set_route((model, prefix), replica, Origin.REMOTE, now=now)

    @property
    def evicted_routes(self) -> Mapping[Origin, int]:
        """The routes that a full table had no place for, by origin."""
        return self.routes.evicted

    def _with_remote(self, request: RouteRequest, prefixes: list[Prefix]) -> list[Prefix]:
        """Return the prefixes of a prompt, with those that other routers name while there are any."""
        if not request.boundaries or not self.routes.routes_of(Origin.REMOTE):
            return prefixes
        return sorted([*prefixes, *remote_prefixes(request)], key=lambda prefix: prefix.tokens)

    def _longest(self, prefixes: list[Prefix], candidates: Candidates) -> tuple[int, float] | None:
        """Return the row and the tokens of the longest prefix whose replica is a candidate."""
        names, now = candidates.names, candidates.now
        for prefix in reversed(prefixes):
            replica = self.routes.replica_of(prefix.key, now=now)
            if replica is not None and replica in names:
                return names.index(replica), prefix.tokens
        return None


def _prompt_hash(request: RouteRequest) -> int:
    """Return the hash of the first 128 tokens; of the first 256 for a shorter prompt."""
    prefixes = even_prefixes(request)
    return int.from_bytes(prefixes[0].key[1], "little") if prefixes else request.prefix_hash


def _place(key: int, candidates: Candidates, weights: Weights) -> int:
    load, rule = candidates.in_flight_requests, int(weights["miss"])
    if rule == 0:
        return bounded_load(candidates.salt, key, load, factor=weights["load_factor"])
    if rule == 1:
        return two_choices(candidates.salt, key, load, bias=weights["bias"])
    return jump_hash(key, len(candidates)) if rule == 2 else key % len(candidates)


def _is_overloaded(row: int, load: Floats, weights: Weights) -> bool:
    factor = weights["override"]
    return factor > 0.0 and bool(load[row] > factor * np.median(load) + weights["margin"])
