"""`skywalker`: the near region first, by prefix among replicas without pending requests, then other regions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from gorgo.core.messages.request import RouteRequest
from gorgo.core.numeric import Floats
from gorgo.core.policy.interface import USUAL_SCRAPE_S, Candidates, Choice, IndexKind, argmin_tiebreak, fill_unknown
from gorgo.core.policy.weights import Weights, WeightSpec
from gorgo.policies.base import longest_match


class SkyWalker:
    """The longest prefix among the near replicas without pending requests, else in the best other region.

    The first layer is a region's balancer: of its replicas that are available it takes the one with the longest match,
    ties to the fewest in flight. A replica is available while it has no pending request, so that requests are pushed to
    replicas that begin them at once. If no near replica is available, the second layer pushes the request to the region
    whose available replicas have the longest match, ties to the nearest (`remote`), and its balancer chooses there. If
    no replica anywhere is available, the near one with the fewest pending requests serves (`pending`).

    From the paper are the two layers, the longest match in each, and pushing by pending requests. Decided here: this
    router is the balancer of the region it is in, and one set of replicas within `near_ms` of each other by round trip
    is a region, since a policy sees distances. A request is pending while another one of this router is before its
    first token on the replica, or while the replica reported a queue. The paper's balancers queue a request when no
    replica is available; a policy never waits, the queue of the router is for that.

    References
    ----------
    SkyWalker: A Locality-Aware Cross-Region Load Balancer for LLM Inference, EuroSys 2026, arXiv 2505.24095.
    """

    name: ClassVar[str] = "skywalker"
    summary: ClassVar[str] = (
        "SkyWalker: longest prefix among near replicas without pending requests, else in another region that has such"
    )
    unit: ClassVar[str] = ""
    index: ClassVar[IndexKind] = "published"
    signal_ages: ClassVar[Mapping[str, float]] = {"queued_requests": USUAL_SCRAPE_S}
    #: It reads requests before a first token, which are counted for policies that say so.
    reads_progress: ClassVar[bool] = True
    weight_specs: ClassVar[tuple[WeightSpec, ...]] = (
        WeightSpec("near_ms", 10.0, 0.1, 1000.0, "most difference of round trips within a region", tunable="no"),
    )

    def choose(
        self, request: RouteRequest, candidates: Candidates, weights: Weights, rng: np.random.Generator
    ) -> Choice:
        rtt_ms = fill_unknown(candidates.rtt_s) * 1e3
        pending, cached = _pending(candidates), candidates.cached_tokens
        terms = {"cached_tokens": cached.copy(), "pending": pending, "rtt": rtt_ms}
        region = regions_of(rtt_ms, weights["near_ms"])
        free = pending == 0.0
        near = region == 0
        if (near & free).any():
            return Choice(longest_match(np.flatnonzero(near & free), candidates, rng), terms)
        if free.any():
            # The nearest of the regions with the longest match: regions are numbered by distance.
            best = region[free & (cached == cached[free].max())].min()
            rows = np.flatnonzero(free & (region == best))
            return Choice(longest_match(rows, candidates, rng), terms, fallback="remote")
        rows = np.flatnonzero(near)
        row = argmin_tiebreak(pending[rows], candidates.in_flight_requests[rows], rng)
        return Choice(int(rows[row]), terms, fallback="pending")


def regions_of(rtt_ms: Floats, near_ms: float) -> NDArray[np.intp]:
    """Return the number of each row's region, 0 for the nearest: rows within `near_ms` of a region's nearest are in it.

    Example
    -------
    >>> regions_of(np.array([95.0, 2.0, 180.0, 97.0, 3.0]), 10.0).tolist()
    [1, 0, 2, 1, 0]
    """
    numbers = np.zeros(len(rtt_ms), dtype=np.intp)
    number, begins_ms = -1, -np.inf
    for row in rtt_ms.argsort(kind="stable"):
        if rtt_ms[row] - begins_ms > near_ms:
            number, begins_ms = number + 1, rtt_ms[row]
        numbers[row] = number
    return numbers


def _pending(candidates: Candidates) -> Floats:
    """Return the requests that wait for another one to begin: by this router's counts, or as reported if more."""
    before_first = candidates.in_flight_requests - np.nan_to_num(candidates.decoding_requests)
    pending: Floats = np.maximum(np.maximum(before_first, 0.0), fill_unknown(candidates.queued_requests))
    return pending
