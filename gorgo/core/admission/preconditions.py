"""Preconditions of a request: a replica that could serve it, and the bounds of the proxy and of its client."""

from __future__ import annotations

from gorgo.core.dispatch.outcomes import (
    model_not_found,
    quota_exceeded,
    region_not_allowed,
    replica_not_found,
    subset_unknown,
    too_many_in_flight,
)
from gorgo.core.fleet.fleet import Fleet
from gorgo.core.fleet.request_filter import RequestFilter
from gorgo.core.messages.actions import Reject
from gorgo.core.messages.request import RouteRequest
from gorgo.core.quotas import ClientQuotas


class Preconditions:
    """Checks requests before their admission.

    Parameters
    ----------
    fleet, request_filter, quotas:
        The Router's.
    """

    __slots__ = ("_filter", "_fleet", "_quotas")

    def __init__(self, fleet: Fleet, request_filter: RequestFilter, quotas: ClientQuotas) -> None:
        self._fleet = fleet
        self._filter = request_filter
        self._quotas = quotas

    def refuse(self, request: RouteRequest, *, unfinished: int, most: int, now: float) -> Reject | None:
        """Reject a request that no replica can serve or that is over a limit; else count it for its client.

        `unfinished` attempts and queued requests are in the Router, of `most`.
        """
        if not self._fleet.eligibility.serves(request.model):
            return model_not_found(request)
        if unfinished >= most:
            return too_many_in_flight(request, most)
        if request.pinned_replica is not None and request.pinned_replica not in self._fleet.replicas:
            return replica_not_found(request)
        if request.regions is not None and not self._filter.has_replica_in(request.regions, request):
            return region_not_allowed(request)
        if request.replicas is not None and not self._filter.has_replica_of_subset(request):
            return subset_unknown(request)
        exceeded = self._quotas.acquire(request.client, now=now, tokens=request.prompt_tokens)
        return None if exceeded is None else quota_exceeded(request, exceeded)
