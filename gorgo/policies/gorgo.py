"""`gorgo`: the policy of the GORGO paper, equation 3, exactly as published."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.interface import Candidates, Choice, IndexKind, choose_min_cost, fill_unknown
from gorgo.core.policy.weights import Weights, WeightSpec


class Gorgo:
    """Network, queue and prefill in one sum, in tokens: the weight of a token to prefill is 1, only ratios matter.

    An unknown round trip counts as the worst known one. The prefix index is the published one: bounded by memory
    only, not corrected by engines' reports. Unlike the papers' it forgets failed attempts and restarted replicas.

    References
    ----------
    GORGO paper, equation 3; the start values of its section on tuning. The box is wider than its own, which
    `tuner.space.PUBLISHED_BOXES` has: GPUs compute 4 to 140 tokens in the millisecond that `w_rtt` weighs.
    """

    name: ClassVar[str] = "gorgo"
    summary: ClassVar[str] = "GORGO paper: least w_rtt * RTT + w_queue * queued prompt tokens + uncached prompt tokens"
    unit: ClassVar[str] = "tokens"
    index: ClassVar[IndexKind] = "published"
    weight_specs: ClassVar[tuple[WeightSpec, ...]] = (
        WeightSpec("w_rtt", 0.5, 0.05, 200.0, "tokens per ms of round trip to the replica"),
        WeightSpec("w_queue", 0.1, 0.02, 5.0, "tokens per prompt token in flight on the replica"),
    )

    def choose(
        self, request: RouteRequest, candidates: Candidates, weights: Weights, rng: np.random.Generator
    ) -> Choice:
        terms = {  # equation 3
            "rtt": weights["w_rtt"] * (fill_unknown(candidates.rtt_s) * 1e3),
            "queue": weights["w_queue"] * candidates.in_flight_tokens,
            "prefill": candidates.uncached_tokens,
        }
        return choose_min_cost(terms, candidates, rng)
