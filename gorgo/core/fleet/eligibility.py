"""Eligibility: the filter before any cost, by model, region, drain mark and ejection, with the panic threshold.

Slow start and tried replicas are excluded by their owners, with `CandidateSet.excluding`.

Theory of operation: the result is computed once per model and set of regions, and retained until an event that could
change it; the common case is one look-up. A panic is when too few of the replicas that could serve are healthy: a
failure everywhere is rarely the replica's fault. Replicas ejected for failed attempts are then tried again soon, and
with none healthy ejection by attempts is ignored. A replica that fails its probes is a candidate only without another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gorgo.core.fleet.columns import Columns
from gorgo.core.fleet.outlier import HealthState
from gorgo.core.fleet.replica import Replica


@dataclass(frozen=True, slots=True)
class CandidateSet:
    """Replicas that may serve a model now, one row each in slot order, and why the others are excluded."""

    replicas: Sequence[Replica]
    slots: NDArray[np.intp]
    names: Sequence[str]
    #: The rows are all slots of the columns, in order.
    is_all: bool
    excluded: Mapping[str, str]
    #: Too few are healthy.
    panic: bool = False

    def excluding(self, names: Set[str], why: str = "tried") -> CandidateSet:
        """Return the set without `names`, by default because the request has tried them."""
        left = [replica for replica in self.replicas if replica.spec.name not in names]
        # Sorted: the order of a set differs between processes.
        excluded = {**self.excluded, **dict.fromkeys(sorted(names), why)}
        return _rows(left, self.is_all and len(left) == len(self.replicas), excluded, panic=self.panic)


class EligibilityFilter:
    """Filters the fleet's replicas.

    Parameters
    ----------
    replicas, columns:
        The fleet's.
    panic_threshold:
        As in `Fleet`; may be replaced, with `invalidate`.
    """

    __slots__ = ("_any_model", "_cached", "_columns", "_listed", "_replicas", "models_changes", "panic_threshold")

    def __init__(self, replicas: Mapping[str, Replica], columns: Columns, *, panic_threshold: float) -> None:
        self._replicas = replicas
        self._columns = columns
        self.panic_threshold = panic_threshold
        self._cached: dict[tuple[str | None, frozenset[str] | None], CandidateSet] = {}
        #: Models that some replica serves by name, and whether some replica takes any other name.
        self._listed: frozenset[str] = frozenset()
        self._any_model = False
        #: Counts changes of models and of the fleet.
        self.models_changes = 0

    # -- changes

    def on_models_change(self) -> None:
        """Apply a replaced fleet, or a changed list of models of a replica."""
        self.models_changes += 1
        replicas = self._replicas.values()
        self._listed = frozenset(model for replica in replicas for model in replica.models)
        self._any_model = not all(replica.spec.models for replica in replicas)
        self.invalidate()

    def invalidate(self) -> None:
        """Drop the retained results after a change of replicas, health, drain marks or threshold.

        In a panic, shorten the back-off of replicas ejected for failed attempts.
        """
        self._cached.clear()
        healths = [replica.health for replica in self._replicas.values() if not replica.draining]
        if sum(health.state is HealthState.HEALTHY for health in healths) < self.panic_threshold * len(healths):
            for health in healths:
                health.shorten_backoff()

    # -- candidates

    def for_model(self, model: str | None, regions: frozenset[str] | None = None) -> CandidateSet:
        """Return the candidates for `model` in `regions`."""
        # A name that no replica lists is one group whatever it is, so clients cannot fill the cache with names.
        # Sets of regions come from the configuration.
        key = (model if model is None or model in self._listed else ""), regions
        found = self._cached.get(key)
        if found is None:
            found = self._cached[key] = self._filter(*key)
        return found

    def pinned(self, pinned: Replica) -> CandidateSet:
        """Return the replica of a pinned request, even if draining or ejected: no other can serve it."""
        excluded = {other: "pinned" for other in self._replicas if other != pinned.spec.name}
        return _rows([pinned], len(self._columns.salt) == 1, excluded, panic=False)

    @property
    def none(self) -> CandidateSet:
        """The empty set, for a pinned request whose replica has left."""
        return _rows([], False, dict.fromkeys(self._replicas, "pinned"), panic=False)

    def serves(self, model: str | None) -> bool:
        """Return whether any replica serves `model`, healthy or not; True for an empty fleet, which may fill."""
        return not self._replicas or self._any_model or model is None or model in self._listed

    def lists(self, model: str | None) -> bool:
        """Return whether some replica serves `model` by name; True without a name."""
        return model is None or model in self._listed

    def regions_of_models(self) -> dict[str, frozenset[str]]:
        """Return the regions of each listed model, replicas that serve any model included."""
        replicas = self._replicas.values()
        return {
            model: frozenset(replica.spec.region for replica in replicas if self._serves(replica, model))
            for model in self._listed
        }

    def slots_serving(self, model: str | None) -> list[int]:
        """Return the slots of the replicas that serve `model`, healthy or not."""
        return [replica.slot for replica in self._replicas.values() if self._serves(replica, model)]

    def has_replica_in(self, regions: frozenset[str], model: str | None) -> bool:
        """Return whether a replica in `regions` serves `model`, healthy or not; True for an empty fleet."""
        replicas = self._replicas.values()
        return not replicas or any(
            replica.spec.region in regions and self._serves(replica, model) for replica in replicas
        )

    # -- helpers

    def _filter(self, model: str | None, regions: frozenset[str] | None) -> CandidateSet:
        excluded: dict[str, str] = {}
        available: list[Replica] = []
        for name, replica in self._replicas.items():
            reason = self._unfit(replica, model, regions)
            if reason is None:
                available.append(replica)
            else:
                excluded[name] = reason
        healthy = sum(replica.health.state is HealthState.HEALTHY for replica in available)
        panic = healthy < self.panic_threshold * len(available)
        left = [replica for replica in available if replica.health.can_accept]
        if panic and not healthy:
            not_probe_down = [each for each in available if each.health.can_accept or not each.health.probe_down]
            left = not_probe_down or available
        staying = {replica.spec.name for replica in left}
        excluded |= {replica.spec.name: "ejected" for replica in available if replica.spec.name not in staying}
        left.sort(key=lambda replica: replica.slot)
        return _rows(left, len(left) == len(self._columns.salt), excluded, panic=panic)

    def _unfit(self, replica: Replica, model: str | None, regions: frozenset[str] | None) -> str | None:
        """Return why a replica is excluded whatever its health."""
        if not self._serves(replica, model):
            return "model"
        if regions is not None and replica.spec.region not in regions:
            return "region"
        return "draining" if replica.draining else None

    def _serves(self, replica: Replica, model: str | None) -> bool:
        """Return whether a replica serves `model`.

        A name that no replica lists goes to those without configured models: only the engine knows it.
        """
        if model is None or model in replica.spec.models or model in replica.listed_models:
            return True
        return not replica.spec.models and not (replica.listed_models and model in self._listed)


def _rows(replicas: Sequence[Replica], is_all: bool, excluded: Mapping[str, str], *, panic: bool) -> CandidateSet:
    slots = np.array([replica.slot for replica in replicas], dtype=np.intp)
    return CandidateSet(replicas, slots, tuple(replica.spec.name for replica in replicas), is_all, excluded, panic)
