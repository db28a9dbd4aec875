"""Candidates of one request: replicas that may serve it now, by model, place, pin, health, pauses and slow start."""

from __future__ import annotations

from collections.abc import Set

from gorgo.core.fleet.busy import BusyPauses
from gorgo.core.fleet.eligibility import CandidateSet
from gorgo.core.fleet.fleet import Fleet
from gorgo.core.fleet.refused_kinds import RefusedKinds
from gorgo.core.fleet.short_answers import ShortAnswers
from gorgo.core.fleet.slow_start import SlowStart
from gorgo.core.messages.request import RouteRequest


class RequestFilter:
    """Applies the fleet's eligibility, pauses of busy replicas and the slow-start limits to a request.

    Parameters
    ----------
    fleet, slow_start, busy, refused_kinds, short_answers:
        The Router's.
    """

    __slots__ = ("_busy", "_fleet", "_refused_kinds", "_short_answers", "_slow_start")

    def __init__(
        self,
        fleet: Fleet,
        slow_start: SlowStart,
        busy: BusyPauses,
        refused_kinds: RefusedKinds,
        short_answers: ShortAnswers,
    ) -> None:
        self._fleet = fleet
        self._slow_start = slow_start
        self._busy = busy
        self._refused_kinds = refused_kinds
        self._short_answers = short_answers

    def eligible(self, request: RouteRequest, now: float) -> CandidateSet:
        """Return the candidates; none if the pinned replica has left or is one that may not serve the request."""
        eligibility = self._fleet.eligibility
        if request.pinned_replica is None:
            return self._open(self._for_request(request), request, now)
        pinned = self._fleet.replicas.get(request.pinned_replica)
        # It may have moved to another region while the request was queued.
        if pinned is None or (request.regions is not None and pinned.spec.region not in request.regions):
            return eligibility.none
        if request.replicas is not None and pinned.spec.name not in request.replicas:
            return eligibility.none
        return eligibility.pinned(pinned)

    def untried(self, request: RouteRequest, tried: Set[str], now: float) -> CandidateSet:
        """Return the candidates for a retry; none for a pinned request."""
        if request.pinned_replica is not None:
            return self._fleet.eligibility.none
        # Slow start last: a replica at its limit is excluded beside others that can serve, not beside those tried.
        return self._open(self._for_request(request).excluding(tried), request, now)

    def has_replica_in(self, regions: frozenset[str], request: RouteRequest) -> bool:
        """Return whether a replica in `regions` would serve the request, healthy or not."""
        if request.pinned_replica is None:
            return self._fleet.eligibility.has_replica_in(regions, request.model)
        return self._fleet.replicas[request.pinned_replica].spec.region in regions

    def has_replica_of_subset(self, request: RouteRequest) -> bool:
        """Return whether a replica of the request's subset would serve it, healthy or not; True without one."""
        subset, pinned = request.replicas, request.pinned_replica
        if subset is None or (pinned is not None and pinned in subset):
            return True
        return pinned is None and self._fleet.eligibility.has_replica_of(subset, request.model)

    def _for_request(self, request: RouteRequest) -> CandidateSet:
        return self._fleet.eligibility.for_model(request.model, request.regions, request.replicas)

    def _open(self, eligible: CandidateSet, request: RouteRequest, now: float) -> CandidateSet:
        eligible = self._refused_kinds.exclude_refusing(eligible, request, now=now)
        eligible = self._short_answers.exclude_paused(eligible, now=now)
        return self._slow_start.exclude_full(self._busy.exclude_paused(eligible, now=now), now=now)
