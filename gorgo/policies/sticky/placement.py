"""Placement of a prompt without a route: a replica by the hash of its beginning, some rules with respect to load."""

from __future__ import annotations

from math import ceil

import numpy as np
from numpy.typing import NDArray

from gorgo.core.arrays import Floats
from gorgo.policies.base import rendezvous_scores

_MASK = (1 << 64) - 1


def bounded_load(salt: NDArray[np.uint64], key: int, load: Floats, *, factor: float) -> int:
    """Return the first row in the key's order of replicas that is below `factor` times the mean load with the request.

    The order is that of rendezvous scores, in place of a ring.

    References
    ----------
    Mirrokni, Thorup and Zadimoghaddam, Consistent hashing with bounded loads, 2018.
    """
    cap = ceil(max(factor, 1.0) * (float(load.sum()) + 1.0) / len(load))
    return int(np.where(load < cap, rendezvous_scores(salt, key), np.uint64(0)).argmax())


def two_choices(salt: NDArray[np.uint64], key: int, load: Floats, *, bias: float) -> int:
    """Return the first row in the key's order of replicas, or the second if it has over `bias` requests less."""
    scores = rendezvous_scores(salt, key)
    first = int(scores.argmax())
    if len(scores) == 1:
        return first
    scores[first] = 0
    second = int(scores.argmax())
    return second if load[first] > load[second] + bias else first


def jump_hash(key: int, buckets: int) -> int:
    """Return the bucket of a key; one more bucket moves the least share of keys.

    References
    ----------
    Lamping and Veach, A fast, minimal memory, consistent hash algorithm, 2014.
    """
    bucket, following = -1, 0
    while following < buckets:
        bucket = following
        key = (key * 2862933555777941757 + 1) & _MASK
        following = int((bucket + 1) * ((1 << 31) / ((key >> 33) + 1)))
    return bucket
