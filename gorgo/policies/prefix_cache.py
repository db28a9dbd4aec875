"""Policies that follow the longest cached prefix: the baselines of three papers and of llm-d.

Owns five rules: `prefix-cache` as the authors of the GORGO paper released it, AIBrix's rule by requests in flight,
Lodestar's algorithms 1 and 2 (`prefix-cache-and-load`, `prefix-threshold`) and llm-d's default scorers (`load-prefix`).
Leaves to `gorgo.policies.base` what several of them share, and the match itself to the prefix index.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from gorgo.core.messages.request import RouteRequest
from gorgo.core.numeric import Floats
from gorgo.core.policy.interface import USUAL_SCRAPE_S, Candidates, Choice, IndexKind, argmin_tiebreak, fill_unknown
from gorgo.core.policy.weights import Weights, WeightSpec
from gorgo.policies.base import IMBALANCE, evidence, least_loaded, longest_match, longest_prefix


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
    #: The paper's baseline works by reports of any age.
    signal_ages: ClassVar[Mapping[str, float]] = {"running_requests": USUAL_SCRAPE_S}
    weight_specs: ClassVar[tuple[WeightSpec, ...]] = ()

    def choose(
        self, request: RouteRequest, candidates: Candidates, weights: Weights, rng: np.random.Generator
    ) -> Choice:
        running = fill_unknown(candidates.running_requests).copy()
        in_flight = candidates.in_flight_requests.copy()
        cached = candidates.cached_tokens.copy()
        terms = {"cached_tokens": cached, "running": running, "in_flight": in_flight}
        longest = cached.max()
        fallback = "imbalance" if running.max() - running.min() > IMBALANCE else None if longest > 0 else "no_match"
        if fallback is not None:
            load = np.maximum(running, in_flight)
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
        self, request: RouteRequest, candidates: Candidates, weights: Weights, rng: np.random.Generator
    ) -> Choice:
        return longest_prefix(candidates, rng, deviations=2)


class PrefixCacheAndLoad:
    """As `prefix-cache-in-flight`, but a replica counts as overloaded above mean + 1 standard deviation.

    References
    ----------
    Lodestar paper, algorithm 1; AIBrix, policy prefix-cache with its default factor.
    """

    name: ClassVar[str] = "prefix-cache-and-load"
    summary: ClassVar[str] = (
        "Lodestar Alg. 1: longest prefix unless overloaded (mean + 1 sd) or unbalanced (by more than 8)"
    )
    unit: ClassVar[str] = ""
    index: ClassVar[IndexKind] = "bounded"
    weight_specs: ClassVar[tuple[WeightSpec, ...]] = ()

    def choose(
        self, request: RouteRequest, candidates: Candidates, weights: Weights, rng: np.random.Generator
    ) -> Choice:
        return longest_prefix(candidates, rng, deviations=1)


class PrefixThreshold:
    """The best match when it covers more than a share tau of the prompt, else the least loaded.

    The paper tunes tau per trace (0.2 to 0.6), so it is a weight here and starts in between. At 1 no match is ever long
    enough.

    References
    ----------
    Lodestar paper, algorithm 2.
    """

    name: ClassVar[str] = "prefix-threshold"
    summary: ClassVar[str] = (
        "Lodestar Alg. 2: longest prefix if it covers more than tau of the prompt, else fewest in flight"
    )
    unit: ClassVar[str] = ""
    index: ClassVar[IndexKind] = "bounded"
    weight_specs: ClassVar[tuple[WeightSpec, ...]] = (
        WeightSpec("tau", 0.5, 0.05, 1.0, "share of the prompt that must be cached"),
    )

    def choose(
        self, request: RouteRequest, candidates: Candidates, weights: Weights, rng: np.random.Generator
    ) -> Choice:
        if candidates.cached_tokens.max() <= weights["tau"] * candidates.prompt_tokens:
            return Choice(least_loaded(candidates, rng), evidence(candidates), fallback="below_threshold")
        return Choice(longest_match(np.arange(len(candidates)), candidates, rng), evidence(candidates))


class LoadPrefix:
    """cost = prefix * uncached share + queue * place of the engine's queue + kv * KV usage; ties at random.

    The place of a queue is 0 for the shortest among the candidates and 1 for the longest, whatever the lengths. A
    missing report counts as the worst known, which costs as much as a queue or a KV pool of that size. The blog's two
    sets of weights are 1:1:1, the default here, and 3:2:2.

    References
    ----------
    llm-d, `prefix-cache-scorer`, `queue-scorer` and `kv-cache-utilization-scorer` with its max-score picker.
    """

    name: ClassVar[str] = "load-prefix"
    summary: ClassVar[str] = (
        "llm-d's scorers: least uncached share + relative queue + KV usage, weighted, ties at random"
    )
    unit: ClassVar[str] = "share"
    index: ClassVar[IndexKind] = "published"
    #: llm-d reads its engines each 50 ms; a second is what an engine answers without slowing down.
    signal_ages: ClassVar[Mapping[str, float]] = {"queued_requests": 1.0, "used_tokens": 1.0}
    weight_specs: ClassVar[tuple[WeightSpec, ...]] = (
        WeightSpec("prefix", 1.0, 0.1, 10.0, "on the share of the prompt that is not cached"),
        WeightSpec("queue", 1.0, 0.1, 10.0, "on the queue, 0 for the shortest and 1 for the longest"),
        WeightSpec("kv", 1.0, 0.1, 10.0, "on the share of the KV pool in use"),
    )

    def choose(
        self, request: RouteRequest, candidates: Candidates, weights: Weights, rng: np.random.Generator
    ) -> Choice:
        terms = {
            "prefix": weights["prefix"] * candidates.uncached_tokens / max(candidates.prompt_tokens, 1),
            "queue": weights["queue"] * _relative(fill_unknown(candidates.queued_requests)),
            "kv": weights["kv"] * fill_unknown(_usage(candidates)),
        }
        cost = terms["prefix"] + terms["queue"] + terms["kv"]
        return Choice(argmin_tiebreak(cost, cost, rng), terms, cost, ties=cost)


def _relative(queued: Floats) -> Floats:
    """Return each queue's place between the shortest and the longest; 0 where all are as long."""
    shortest = queued.min()
    relative: Floats = (queued - shortest) / max(float(queued.max() - shortest), np.finfo(np.float64).tiny)
    return relative


def _usage(candidates: Candidates) -> Floats:
    """Return the share of each KV pool in use, NaN where a figure is unknown; an engine may count more than fits."""
    pool = np.where(candidates.kv_capacity_tokens > 0, candidates.kv_capacity_tokens, np.nan)
    usage: Floats = np.clip(candidates.used_tokens / pool, 0.0, 1.0)
    return usage
