"""Rules that several policies share: by load, by longest prefix among replicas not overloaded, by rendezvous hashing.

Load is the count of requests in flight from this proxy, which is never unknown and never stale.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gorgo.core.numeric import Floats
from gorgo.core.policy.interface import Candidates, Choice, argmin_tiebreak

#: Difference in requests between the most and the least loaded above which prefixes are ignored, as in AIBrix.
IMBALANCE = 8


def least_loaded(candidates: Candidates, rng: np.random.Generator) -> int:
    """Row with the fewest requests in flight, ties at random."""
    load = candidates.in_flight_requests
    return argmin_tiebreak(load, load, rng)


def longest_match(rows: NDArray[np.intp], candidates: Candidates, rng: np.random.Generator) -> int:
    """Of `rows`, the one with the longest cached prefix; ties go to the fewest in flight, then to chance."""
    return int(rows[argmin_tiebreak(-candidates.cached_tokens[rows], candidates.in_flight_requests[rows], rng)])


def evidence(candidates: Candidates) -> dict[str, Floats]:
    """Return a copy of the inputs of a rule without a cost, to explain the decision later."""
    return {"cached_tokens": candidates.cached_tokens.copy(), "in_flight": candidates.in_flight_requests.copy()}


def longest_prefix(candidates: Candidates, rng: np.random.Generator, *, deviations: float) -> Choice:
    """Longest prefix among replicas that are not overloaded, else the least loaded.

    The walk over matched replicas, longest match first and least loaded first among equals, taking the first whose
    load is at most mean + `deviations` * standard deviation, is the same as the longest match among those that pass.

    Parameters
    ----------
    deviations:
        Standard deviations (over n - 1, as in AIBrix) above the mean load at which a replica counts as overloaded.
    """
    load = candidates.in_flight_requests
    if load.max() - load.min() > IMBALANCE:
        return Choice(least_loaded(candidates, rng), evidence(candidates), fallback="imbalance")
    matched = candidates.cached_tokens > 0
    if not matched.any():
        return Choice(least_loaded(candidates, rng), evidence(candidates), fallback="no_match")
    # Rounding in the mean must not shut out replicas that are all equally loaded.
    deviation = load.std(ddof=1) if len(load) > 1 else 0.0
    limit = load.mean() + deviations * deviation + 1e-9
    rows = np.flatnonzero(matched & (load <= limit))
    if not len(rows):
        return Choice(least_loaded(candidates, rng), evidence(candidates), fallback="overloaded")
    return Choice(longest_match(rows, candidates, rng), evidence(candidates))


def rendezvous_scores(salt: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """Return a fixed score per replica for 64 bits of `key`; the greatest wins. A change of the fleet moves few keys.

    References
    ----------
    Thaler and Ravishankar, Using name-based mappings to increase hit rates, 1998. The mixer is the finaliser of
    splitmix64 (Steele, Lea and Flood, Fast splittable pseudorandom number generators, 2014).
    """
    mixed_key = _mix(np.array([key & 0xFFFF_FFFF_FFFF_FFFF], dtype=np.uint64))
    return _mix(salt ^ mixed_key)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finaliser: every bit in changes half of the bits out. Arrays wrap around silently, as wanted."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return values ^ (values >> np.uint64(31))
