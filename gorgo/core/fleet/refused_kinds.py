"""Kinds of requests that a replica refuses and others answer: it gets none of them for a while.

A replica may lack a route or a model name and be well for all others. Its failures are then never three in a row, so
outlier detection does not eject it, and each such request would be tried there first. A kind is a route and a model;
only kinds that another replica has answered are recorded, so that clients cannot fill the table with names.
"""

from __future__ import annotations

from collections.abc import Mapping

from gorgo.core.fleet.eligibility import CandidateSet
from gorgo.core.fleet.replica import Replica
from gorgo.core.lru import Lru
from gorgo.core.messages.request import RouteRequest

#: Proven refusals after which a replica gets no request of a kind, and for how long, s.
REFUSALS_OF_A_KIND = 3
WITHOUT_KIND_S = 10.0
#: Kinds at once: more than routes times models of any fleet in practice; the oldest is forgotten.
MAX_KINDS = 256

Kind = tuple[str, str | None]


class RefusedKinds:
    """Proven refusals by kind and replica."""

    __slots__ = ("_kinds",)

    def __init__(self) -> None:
        #: Count and time of the last one.
        self._kinds = Lru[Kind, dict[Replica, tuple[int, float]]](MAX_KINDS)

    def on_proven(self, replica: Replica, request: RouteRequest, *, now: float) -> None:
        """Record that another replica has answered a request that `replica` refused."""
        kind = _kind(request)
        found = self._kinds.get(kind)
        if found is None:
            found = {}
            self._kinds.put(kind, found)
        found[replica] = found.get(replica, (0, now))[0] + 1, now

    def on_answer(self, replica: Replica, request: RouteRequest) -> None:
        """Forget the refusals of a kind that `replica` answers."""
        if self._kinds and (found := self._kinds.get(_kind(request))) is not None:
            found.pop(replica, None)
            if not found:
                del self._kinds[_kind(request)]

    def exclude_refusing(self, eligible: CandidateSet, request: RouteRequest, *, now: float) -> CandidateSet:
        """Return the candidates that do not refuse the request's kind, or all if each does."""
        if not self._kinds:
            return eligible
        found: Mapping[Replica, tuple[int, float]] = self._kinds.get(_kind(request), {})
        refusing = [
            replica
            for replica, (count, last_s) in found.items()
            if count >= REFUSALS_OF_A_KIND and now < last_s + WITHOUT_KIND_S and replica in eligible
        ]
        if not refusing or len(refusing) == len(eligible.replicas):
            return eligible
        return eligible.excluding_some(refusing, "refuses")

    def on_fleet_change(self) -> None:
        """Forget replicas that left."""
        for kind, found in list(self._kinds.items()):
            left = {replica: counted for replica, counted in found.items() if replica.slot >= 0}
            if left:
                self._kinds[kind] = left
            else:
                del self._kinds[kind]


def _kind(request: RouteRequest) -> Kind:
    return request.route, request.model
