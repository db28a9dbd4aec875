"""The affinity gate: keep to replicas that have the prompt cached, unless they are much later than the others.

References
----------
llm-d-router, `prefix-cache-affinity-filter`.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import numpy as np

from gorgo.core.arrays import Floats, Rows
from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.candidates import Candidates
from gorgo.policies.learned.guards import Guard

_HASH_BYTES = 8


class Gated(NamedTuple):
    """The rows that pass, and why they are all or not."""

    rows: Rows
    guard: Guard | None


def cached_shares(request: RouteRequest, candidates: Candidates) -> Floats:
    """Return the share of the prompt's full blocks that each candidate has; 0 without a full block."""
    full_tokens = len(request.blocks) // _HASH_BYTES * request.block_tokens
    if full_tokens <= 0.0:
        return np.zeros(len(candidates))
    return np.minimum(candidates.cached_tokens / full_tokens, 1.0)


def gate(rows: Rows, shares: Floats, ttft_s: Floats, *, share: float, max_penalty_s: float, explores: bool) -> Gated:
    """Return those of `rows` with at least `share` of the prompt cached, or all of them.

    All pass where none or each has that share; if `explores`; and where the best of those that have it is later than
    the best of the others by more than `max_penalty_s`.

    Parameters
    ----------
    rows:
        Candidates still in question.
    shares, ttft_s:
        Cached share and predicted time to first token of every candidate.
    share:
        0 is no gate.
    max_penalty_s:
        0 is no limit.
    """
    cached = shares[rows] >= share
    if len(rows) <= 1 or share <= 0.0 or not cached.any() or cached.all():
        return Gated(rows, None)
    if explores:
        return Gated(rows, "explore")
    penalty_s = float(ttft_s[rows[cached]].min() - ttft_s[rows[~cached]].min())
    if penalty_s > (max_penalty_s or inf):
        return Gated(rows, "affinity_left")
    return Gated(rows[cached], "affinity_kept")
