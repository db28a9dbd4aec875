"""Who may serve a request now, and why the others may not.

Owns the filter before any cost: models, regions, drain marks, ejection, and panic, in which ejection is ignored or cut
short. Who is in the fleet and how well each is doing belongs to `fleet` and `health`; slow start and what a request has
tried are left out by their owners, with `Eligible.without`.

Theory of operation: the answer is worked out once per model and set of regions, kept, and forgotten at the next event
that could change it; the common case is one look-up. Panic is when too few of those who could serve are healthy: what
fails everywhere is rarely the replica's fault. Whoever was ejected for failed attempts is then tried again soon, and
with nobody healthy ejection by attempts is ignored; who answers no ping is asked only when there is nobody else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gorgo.core.fleet.columns import Columns
from gorgo.core.fleet.outlier import HealthState
from gorgo.core.fleet.replica import Replica
from gorgo.core.fleet.spec import ReplicaSpec


@dataclass(frozen=True, slots=True)
class CandidateSet:
    """Who may serve a model now, one row each in slot order, and why the others may not."""

    replicas: Sequence[Replica]
    slots: NDArray[np.intp]
    names: Sequence[str]
    #: The rows are all slots of the columns, in order.
    is_all: bool
    excluded: Mapping[str, str]
    #: Too few are healthy.
    panic: bool = False

    def excluding(self, names: Set[str], why: str = "tried") -> CandidateSet:
        """The rows but for those named, by default because the request has been there."""
        left = [member for member in self.replicas if member.spec.name not in names]
        # In one order in every process, which sets have not.
        excluded = {**self.excluded, **dict.fromkeys(sorted(names), why)}
        return _rows(left, self.is_all and len(left) == len(self.replicas), excluded, panic=self.panic)


class EligibilityFilter:
    """Asks the members.

    Parameters
    ----------
    members, columns:
        The fleet's, by name; `columns` has their slots.
    panic_threshold:
        As in `Fleet`; may be replaced, with `invalidate`.
    """

    __slots__ = ("_any_model", "_cached", "_columns", "_listed", "_members", "panic_threshold")

    def __init__(self, members: Mapping[str, Replica], columns: Columns, *, panic_threshold: float) -> None:
        self._members = members
        self._columns = columns
        self.panic_threshold = panic_threshold
        self._cached: dict[tuple[str | None, frozenset[str] | None], CandidateSet] = {}
        #: Models that some replica lists, and whether some replica lists none and so serves any.
        self._listed: frozenset[str] = frozenset()
        self._any_model = False

    # -- what may have changed

    def on_fleet_change(self, specs: Sequence[ReplicaSpec]) -> None:
        """The fleet is another one."""
        self._listed = frozenset(model for spec in specs for model in spec.models)
        self._any_model = not all(spec.models for spec in specs)
        self.invalidate()

    def invalidate(self) -> None:
        """Others are there, healthy or drained, or the threshold is another one.

        In a panic whoever was ejected for failed attempts is tried again soon.
        """
        self._cached.clear()
        here = [member.health for member in self._members.values() if not member.draining]
        if sum(health.state is HealthState.HEALTHY for health in here) < self.panic_threshold * len(here):
            for health in here:
                health.shorten_backoff()

    # -- who

    def for_model(self, model: str | None, regions: frozenset[str] | None = None) -> CandidateSet:
        """Who may serve `model`, in `regions` only."""
        # A name that no replica lists is one group whatever it is, so clients cannot fill the cache with names.
        # Sets of regions come from the configuration.
        key = (model if model is None or model in self._listed else ""), regions
        found = self._cached.get(key)
        if found is None:
            found = self._cached[key] = self._filter(*key)
        return found

    def pinned(self, pinned: Replica) -> CandidateSet:
        """The one replica that can serve a pinned request, draining or ejected or not: nobody else could."""
        excluded = {other: "pinned" for other in self._members if other != pinned.spec.name}
        return _rows([pinned], len(self._columns.salt) == 1, excluded, panic=False)

    @property
    def none(self) -> CandidateSet:
        """For a request whose one replica has left."""
        return _rows([], False, dict.fromkeys(self._members, "pinned"), panic=False)

    def serves(self, model: str | None) -> bool:
        """Whether any replica would serve `model`, well or not. An empty fleet refuses none: it may fill."""
        return not self._members or self._any_model or model is None or model in self._listed

    def anyone_in(self, regions: frozenset[str], model: str | None) -> bool:
        """Whether a replica there would serve `model`, well or not. An empty fleet may fill."""
        specs = [member.spec for member in self._members.values()]
        return not specs or any(spec.region in regions and _serves(spec, model) for spec in specs)

    # -- helpers

    def _filter(self, model: str | None, regions: frozenset[str] | None) -> CandidateSet:
        excluded: dict[str, str] = {}
        available: list[Replica] = []
        for name, member in self._members.items():
            reason = _unfit(member, model, regions)
            if reason is None:
                available.append(member)
            else:
                excluded[name] = reason
        healthy = sum(member.health.state is HealthState.HEALTHY for member in available)
        panic = healthy < self.panic_threshold * len(available)
        left = [member for member in available if member.health.can_accept]
        if panic and not healthy:
            guessed = [each for each in available if each.health.can_accept or not each.health.probe_down]
            left = guessed or available
        staying = {member.spec.name for member in left}
        excluded |= {member.spec.name: "ejected" for member in available if member.spec.name not in staying}
        left.sort(key=lambda member: member.slot)
        return _rows(left, len(left) == len(self._columns.salt), excluded, panic=panic)


def _rows(members: Sequence[Replica], whole: bool, excluded: Mapping[str, str], *, panic: bool) -> CandidateSet:
    """Of members in slot order."""
    slots = np.array([member.slot for member in members], dtype=np.intp)
    return CandidateSet(members, slots, tuple(member.spec.name for member in members), whole, excluded, panic)


def _unfit(member: Replica, model: str | None, regions: frozenset[str] | None) -> str | None:
    """Why it may not serve such a request, however well it is."""
    if not _serves(member.spec, model):
        return "model"
    if regions is not None and member.spec.region not in regions:
        return "region"
    return "draining" if member.draining else None


def _serves(spec: ReplicaSpec, model: str | None) -> bool:
    return model is None or not spec.models or model in spec.models
