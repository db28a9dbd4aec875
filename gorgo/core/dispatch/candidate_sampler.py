"""Candidates of one decision in a large fleet: prefix owners, the least loaded, and others by chance.

Theory of operation. A policy with a cost compares all candidates, which takes a time and a memory in proportion to
them. The best of many is nearly as good as the best of all if the sample has those that the cost favours: the replicas
with most of the prompt cached, which chance would miss, and those with the fewest requests in flight. The rest are
drawn, so that a replica which is good by another signal is compared too, and two routers rarely compare the same. Of
equal ones some are drawn, else all requests would meet at the first of them.

A policy that does not read the prefix index has no owners in its sample, else a baseline would get hits by it.
A policy without a cost (by hash, by turn) needs all candidates, and so has one that says so (`compares_all`).
"""

from __future__ import annotations

from math import inf

import numpy as np

from gorgo.core.arrays import Floats, Rows
from gorgo.core.fleet.columns import Columns
from gorgo.core.fleet.eligibility import CandidateSet
from gorgo.core.policy.interface import Policy

#: Fleets of so many samples and less are compared as a whole: there a sample takes as long as it saves.
LARGE = 16
#: Prefix owners, and as many of the least loaded: a fourth of the sample each.
_PARTS = 4
#: Distinct values of a signal that are searched for the best; below come replicas that chance finds as well.
_LEVELS = 3


def can_sample(policy: Policy) -> bool:
    """Return whether a policy finds its best in a sample."""
    return bool(policy.unit) and not getattr(policy, "compares_all", False)


def sample_candidates(
    eligible: CandidateSet, columns: Columns, matched: Floats | None, *, most: int, rng: np.random.Generator
) -> CandidateSet:
    """Return at most `most` of the candidates. `columns` and `matched` have a cell per slot; no owners without it."""
    load = columns.in_flight_requests
    if not eligible.is_all:
        load = load[eligible.slots]
    owners = _owners(eligible, matched, most // _PARTS, rng)
    least = _least(load, most // _PARTS, rng)
    drawn = rng.integers(len(load), size=most - len(owners) - len(least))
    chosen = np.zeros(len(load), dtype=np.bool_)
    for rows in (owners, least, drawn):
        chosen[rows] = True
    return eligible.sampled(chosen.nonzero()[0])


def _owners(eligible: CandidateSet, matched: Floats | None, count: int, rng: np.random.Generator) -> Rows:
    """Return at most `count` rows with the longest matches."""
    if matched is None:
        return np.zeros(0, dtype=np.intp)
    cached = matched if eligible.is_all else matched[eligible.slots]
    owners = cached.nonzero()[0]
    return owners if len(owners) <= count else _least(-cached, count, rng)


def _least(column: Floats, count: int, rng: np.random.Generator) -> Rows:
    """Return at most `count` rows of the least values; where more are equal, some of them by chance."""
    found: list[Rows] = []
    for _ in range(_LEVELS):
        least = column[column.argmin()]
        rows = (column == least).nonzero()[0]
        if len(rows) >= count:
            found.append(rows[rng.integers(len(rows), size=count)])
            break
        found.append(rows)
        count -= len(rows)
        column = np.where(column > least, column, inf)
    return np.concatenate(found)
