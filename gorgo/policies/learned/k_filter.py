"""The K-filter: while KV pools are full, a prefix group has K replicas, so that its blocks are not copied to all.

Theory of operation. With full pools each copy of a prefix evicts another prefix. A cost that compares replicas of the
moment spreads a popular prefix over the whole fleet, and every replica then evicts all the time. So a group of prompts
with one beginning goes to K replicas only, by rendezvous hashing: when a replica leaves, only its groups move.

References
----------
Lodestar paper, section on cache saturation. Its released code hashes modulo the fleet's size, which moves nearly all
groups at each change of the fleet.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gorgo.core.arrays import Floats
from gorgo.core.policy.cost import fill_unknown
from gorgo.policies.base import rendezvous_scores


def is_saturated(kv_usage: Floats, cached_tokens: Floats, *, saturation: float, min_hit_tokens: float) -> bool:
    """Return whether pools are full and the prompt's prefix is worth the filter.

    Parameters
    ----------
    kv_usage:
        Share of each candidate's KV pool in use, NaN if unknown: it counts as the worst known.
    cached_tokens:
        Of the prompt, per candidate.
    saturation:
        Mean usage above which pools count as full.
    min_hit_tokens:
        The longest match must be longer.
    """
    return bool(cached_tokens.max() > min_hit_tokens and fill_unknown(kv_usage).mean() > saturation)


def replicas_of_group(salt: NDArray[np.uint64], group: int, count: int) -> NDArray[np.intp]:
    """Return the rows of the `count` replicas that serve a prefix group, in order; all if there are no more."""
    if count >= len(salt):
        return np.arange(len(salt))
    scores = rendezvous_scores(salt, group)
    return np.sort(np.argpartition(scores, len(scores) - count)[len(scores) - count :])
