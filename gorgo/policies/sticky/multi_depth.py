"""`multi-depth`: the replica that served the longest part of a prompt, learned at several depths from answers."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from gorgo.core.fleet.columns import Floats
from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.candidates import Candidates
from gorgo.core.policy.choice import Choice
from gorgo.core.policy.interface import IndexKind
from gorgo.core.policy.weights import Weights, WeightSpec
from gorgo.core.prompt.depths import depths_of
from gorgo.policies.base import least_loaded
from gorgo.policies.sticky.placement import bounded_load, jump_hash, two_choices
from gorgo.policies.sticky.routes import Origin, RouteKey, RouteTable

_HASH_BYTES = 8


class MultiDepth:
    """The longest match among routes learned from answers; a hash of the prompt's beginning without one.

    Theory of operation. A completed attempt leaves a route at each depth of its prompt, so a later prompt that shares
    only the beginning finds its replica. If that replica has far more requests than the median, the least loaded
    serves. The route still names the replica of the match or of the hash: a diversion is temporary, and learning it
    would move prefixes to and fro. The published system has a route per message boundary, or at 128 tokens where it
    finds none; a request here has no boundaries, and the depths are 128 tokens apart.

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
    weight_specs: ClassVar[tuple[WeightSpec, ...]] = (
        WeightSpec("depths", 1.0, 0.0, 1.0, "1: a route every 128 tokens; 0: at the deepest alone", tunable="no"),
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
        depths = depths_of(len(request.blocks) // _HASH_BYTES, request.block_tokens)
        keys = [_key(request, depth) for depth in depths]
        matched = np.zeros(len(candidates))
        fallback = None
        found = self._longest(keys, candidates)
        if found is None:
            row, fallback = _place(_prompt_hash(request, depths), candidates, weights), "no_match"
        else:
            row, place = found
            matched[row] = depths[place] * request.block_tokens
        first_chosen = candidates.names[row]
        learned = keys if weights["depths"] >= 1.0 else keys[-1:]
        if _is_overloaded(row, load, weights):
            row, fallback = least_loaded(candidates, rng), "overloaded"

        def learn(now: float) -> None:
            for key in learned:
                self.routes.set_route(key, first_chosen, Origin.LOCAL, now=now)

        terms = {"route_tokens": matched, "in_flight": load.copy()}
        return Choice(row, terms, fallback=fallback, learn=learn if keys else None)

    def add_remote_route(self, model: str | None, prefix: bytes, replica: str, *, now: float) -> None:
        """Add the route of a prefix that another router had answered."""
        self.routes.set_route((model, prefix), replica, Origin.REMOTE, now=now)

    def _longest(self, keys: list[RouteKey], candidates: Candidates) -> tuple[int, int] | None:
        """Return the row and the place in `keys` of the longest prefix whose replica is a candidate."""
        names, now = candidates.names, candidates.now
        for place in range(len(keys) - 1, -1, -1):
            replica = self.routes.replica_of(keys[place], now=now)
            if replica is not None and replica in names:
                return names.index(replica), place
        return None


def _key(request: RouteRequest, depth: int) -> RouteKey:
    return request.recorded_model, request.blocks[(depth - 1) * _HASH_BYTES : depth * _HASH_BYTES]


def _prompt_hash(request: RouteRequest, depths: tuple[int, ...]) -> int:
    """Return the hash of the first 128 tokens; of the first 256 for a shorter prompt."""
    return int.from_bytes(_key(request, depths[0])[1], "little") if depths else request.prefix_hash


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
