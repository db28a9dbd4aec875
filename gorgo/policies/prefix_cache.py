"""`prefix-cache` as the authors of the GORGO paper released it, and AIBrix's rule by requests in flight."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.candidates import Candidates
from gorgo.core.policy.choice import Choice, argmin_tiebreak
from gorgo.core.policy.cost import fill_unknown
from gorgo.core.policy.interface import IndexKind
from gorgo.core.policy.weights import Weights, WeightSpec
from gorgo.policies.base import IMBALANCE, longest_prefix


class PrefixCache:
    """Of the replicas with the longest match, the one with the fewest running requests by the last scrape.

    The rule of `least-request` decides when nothing matches, and when the reports differ by more than 8 requests.

    Theory of operation. The release excludes best matches above mean + 2 standard deviations, and takes all of them
    where none is left. The best match with the fewest running requests passes whenever any does, and wins either way:
    the threshold changes no choice and is left out.

    References
    ----------
    GORGO paper, baselines; the authors' package gorgo-lb 0.2.0, `route_prefix_cache`.
    """

    name: ClassVar[str] = "prefix-cache"
    summary: ClassVar[str] = (
        "GORGO paper, as released: longest prefix, ties to the fewest running as reported; least-request if unbalanced "
        "(by more than 8) or without a match"
    )
    unit: ClassVar[str] = ""
    index: ClassVar[IndexKind] = "published"
    weight_specs: ClassVar[tuple[WeightSpec, ...]] = ()

    def choose(
        self,
        request: RouteRequest,
        candidates: Candidates,
        weights: Weights,
        rng: np.random.Generator,
    ) -> Choice:
        running = fill_unknown(candidates.running_requests).copy()
        own = candidates.in_flight_requests.copy()
        cached = candidates.cached_tokens.copy()
        terms = {"cached_tokens": cached, "running": running, "in_flight": own}
        longest = cached.max()
        fallback = "imbalance" if running.max() - running.min() > IMBALANCE else None if longest > 0 else "no_match"
        if fallback is not None:
            load = np.maximum(running, own)
            return Choice(argmin_tiebreak(load, load, rng), terms, fallback=fallback)
        rows = np.flatnonzero(cached == longest)
        return Choice(int(rows[argmin_tiebreak(running[rows], running[rows], rng)]), terms)


class PrefixCacheInFlight:
    """AIBrix's rule: the longest match among replicas whose load is at most mean + 2 standard deviations.

    The least loaded serves when nothing matches, and when the most and the least loaded differ by more than 8 requests.
    Load is the number of requests in flight, which is never stale. AIBrix's factor is 1 by default
    (`prefix-cache-and-load`); 2 is that of the GORGO paper's authors.

    References
    ----------
    AIBrix, policy prefix-cache.
    """

    name: ClassVar[str] = "prefix-cache-in-flight"
    summary: ClassVar[str] = (
        "AIBrix by requests in flight: longest prefix unless overloaded (mean + 2 sd) or unbalanced (by more than 8)"
    )
    unit: ClassVar[str] = ""
    index: ClassVar[IndexKind] = "published"
    weight_specs: ClassVar[tuple[WeightSpec, ...]] = ()

    def choose(
        self,
        request: RouteRequest,
        candidates: Candidates,
        weights: Weights,
        rng: np.random.Generator,
    ) -> Choice:
        return longest_prefix(candidates, rng, deviations=2)
