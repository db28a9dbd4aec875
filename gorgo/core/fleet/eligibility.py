"""Eligibility: the filter before any cost, by model, region, subset, drain mark and ejection; the panic threshold.

Slow start and tried replicas are excluded by their owners, with `CandidateSet.excluding`.

Theory of operation: the result is computed once per model, set of regions and subset, and retained until an event that
could change it; the common case is one look-up. What does not depend on health is retained longer, and replicas that
are draining or not healthy are known: a change of one costs a copy, not a visit to each. A panic is when too few of the
replicas that could serve are healthy: a failure everywhere is rarely the replica's fault. Replicas ejected for failed
attempts are then tried again soon, and with none healthy ejection by attempts is ignored. A replica that fails its
probes is a candidate only without another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from gorgo.core.fleet.replica import Columns, HealthState, Replica

_Key = tuple[str | None, frozenset[str] | None, frozenset[str] | None]

#: Most results retained: gateways choose the subsets. Each has a row per candidate.
MAX_RETAINED = 64


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
    #: Number of candidates of which these are a sample; `None` if these are all.
    sampled_from: int | None = None

    def sampled(self, rows: NDArray[np.intp]) -> CandidateSet:
        """Return the candidates in some rows, ascending."""
        chosen, replicas, names = rows.tolist(), self.replicas, self.names
        return CandidateSet(
            [replicas[row] for row in chosen],
            self.slots[rows],
            tuple([names[row] for row in chosen]),
            False,
            self.excluded,
            self.panic,
            len(names),
        )

    def __contains__(self, replica: Replica) -> bool:
        row = int(self.slots.searchsorted(replica.slot))
        return row < len(self.slots) and self.replicas[row] is replica

    def excluding(self, names: Set[str], why: str = "tried") -> CandidateSet:
        """Return the set without `names`, by default because the request has tried them."""
        rows = [row for row, name in enumerate(self.names) if name in names]
        return self._without(rows, dict.fromkeys(sorted(names), why), self.panic)

    def excluding_some(self, replicas: Iterable[Replica], why: str) -> CandidateSet:
        """Return the set without some of its replicas, in a time in proportion to them."""
        # Sorted: the order of a set differs between processes.
        left = sorted(replicas, key=lambda replica: replica.spec.name)
        return self.without(left, {replica.spec.name: why for replica in left}, panic=self.panic)

    def without(self, replicas: Sequence[Replica], excluded: Mapping[str, str], *, panic: bool) -> CandidateSet:
        """Return the set without some of its replicas, `excluded` for these reasons beside the others."""
        slots = sorted(replica.slot for replica in replicas)
        return self._without(self.slots.searchsorted(slots).tolist(), excluded, panic)

    def _without(self, rows: Sequence[int], excluded: Mapping[str, str], panic: bool) -> CandidateSet:
        """Return the set without some rows, ascending."""
        replicas, names = list(self.replicas), list(self.names)
        for row in reversed(rows):
            del replicas[row], names[row]
        slots = np.delete(self.slots, rows) if rows else self.slots
        is_all = self.is_all and not rows
        return CandidateSet(replicas, slots, tuple(names), is_all, {**self.excluded, **excluded}, panic)


class EligibilityFilter:
    """Filters the fleet's replicas.

    Parameters
    ----------
    replicas, columns:
        The fleet's.
    panic_threshold:
        As in `Fleet`; may be replaced, with `invalidate`.
    """

    __slots__ = (
        "_any_model",
        "_bases",
        "_cached",
        "_columns",
        "_listed",
        "_replicas",
        "_unavailable",
        "models_changes",
        "panic_threshold",
        "shortest_context",
    )

    def __init__(self, replicas: Mapping[str, Replica], columns: Columns, *, panic_threshold: float) -> None:
        self._replicas = replicas
        self._columns = columns
        self.panic_threshold = panic_threshold
        self._cached: dict[_Key, CandidateSet] = {}
        #: The same whatever the health and drain marks.
        self._bases: dict[_Key, CandidateSet] = {}
        #: Replicas that are draining or not healthy.
        self._unavailable: dict[Replica, None] = {}
        #: Models that some replica serves by name, and whether some replica takes any other name.
        self._listed: frozenset[str] = frozenset()
        self._any_model = False
        #: Of all replicas and models with a known one, tokens: no request that fits has to be filtered by it.
        self.shortest_context = inf
        #: Counts changes of models and of the fleet.
        self.models_changes = 0

    # -- changes

    def on_models_change(self) -> bool:
        """Apply a replaced fleet, or a changed list of models of a replica. Return as `invalidate` does."""
        self.models_changes += 1
        replicas = self._replicas.values()
        self._listed = frozenset(model for replica in replicas for model in replica.models)
        self._any_model = any(self._takes_any(replica) for replica in replicas)
        contexts = [tokens for replica in replicas for tokens in replica.contexts.values()]
        self.shortest_context = min(contexts, default=inf)
        self._bases.clear()
        self._unavailable = {replica: None for replica in replicas if not _is_available(replica)}
        return self.invalidate()

    def on_change(self, replica: Replica) -> bool:
        """Apply a change of a replica's health or drain mark. Return as `invalidate` does."""
        if _is_available(replica) or replica.slot < 0:
            self._unavailable.pop(replica, None)
        else:
            self._unavailable[replica] = None
        return self.invalidate()

    def invalidate(self) -> bool:
        """Drop the results that depend on health, drain marks or the threshold.

        In a panic, shorten the back-off of replicas ejected for failed attempts; return whether there is one.
        """
        self._cached.clear()
        unhealthy = [replica.health for replica in self._unavailable if not replica.draining]
        healthy = len(self._replicas) - len(self._unavailable)
        panic = healthy < self.panic_threshold * (healthy + len(unhealthy))
        for health in unhealthy if panic else ():
            health.shorten_backoff()
        return panic

    # -- candidates

    def for_model(
        self, model: str | None, regions: frozenset[str] | None = None, subset: frozenset[str] | None = None
    ) -> CandidateSet:
        """Return the candidates for `model` in `regions`, and of the names in `subset` if there is one."""
        # A name that no replica lists is one group whatever it is, so clients cannot fill the cache with names.
        # Sets of regions come from the configuration, subsets from gateways.
        key = (model if model is None or model in self._listed else ""), regions, subset
        candidates = self._cached.get(key)
        if candidates is None:
            if len(self._cached) >= MAX_RETAINED:
                self._cached.clear()
            candidates = self._cached[key] = self._filter(*key)
        return candidates

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

    def has_replica_of(self, subset: frozenset[str], model: str | None) -> bool:
        """Return whether a replica of `subset` serves `model`, healthy or not."""
        return any(
            (replica := self._replicas.get(name)) is not None and self._serves(replica, model) for name in subset
        )

    # -- helpers

    def _filter(self, model: str | None, regions: frozenset[str] | None, subset: frozenset[str] | None) -> CandidateSet:
        base = self._base(model, regions, subset)
        # In the order of slots, so that equal states have equal results.
        unavailable = sorted((each for each in self._unavailable if each in base), key=lambda each: each.slot)
        draining = [replica for replica in unavailable if replica.draining]
        unhealthy = [replica for replica in unavailable if not replica.draining]
        available = len(base.replicas) - len(draining)
        healthy = available - len(unhealthy)
        panic = healthy < self.panic_threshold * available
        ejected = [replica for replica in unhealthy if not replica.health.can_accept]
        if panic and not healthy:
            ejected = [replica for replica in ejected if replica.health.probe_down]
            if len(ejected) == available:
                ejected = []
        if not draining and not ejected and panic == base.panic:
            return base
        excluded = {replica.spec.name: "draining" for replica in draining}
        excluded |= {replica.spec.name: _why_ejected(replica) for replica in ejected}
        return base.without([*draining, *ejected], excluded, panic=panic)

    def _base(self, model: str | None, regions: frozenset[str] | None, subset: frozenset[str] | None) -> CandidateSet:
        """Return the replicas that may serve a model there, whatever their health."""
        key = model, regions, subset
        candidates = self._bases.get(key)
        if candidates is None:
            if len(self._bases) >= MAX_RETAINED:
                self._bases.clear()
            candidates = self._bases[key] = self._rows_of(*key)
        return candidates

    def _rows_of(
        self, model: str | None, regions: frozenset[str] | None, subset: frozenset[str] | None
    ) -> CandidateSet:
        excluded: dict[str, str] = {}
        left: list[Replica] = []
        for name, replica in self._replicas.items():
            reason = self._unfit(replica, model, regions, subset)
            if reason is None:
                left.append(replica)
            else:
                excluded[name] = reason
        left.sort(key=lambda replica: replica.slot)
        return _rows(left, len(left) == len(self._columns.salt), excluded, panic=False)

    def _unfit(
        self, replica: Replica, model: str | None, regions: frozenset[str] | None, subset: frozenset[str] | None
    ) -> str | None:
        """Return why a replica is excluded whatever its health and drain mark."""
        if not self._serves(replica, model):
            return "model"
        if regions is not None and replica.spec.region not in regions:
            return "region"
        return "subset" if subset is not None and replica.spec.name not in subset else None

    def _serves(self, replica: Replica, model: str | None) -> bool:
        """Return whether a replica serves `model`.

        A name that no replica lists goes to those that take any: only the engine knows it.
        """
        if model is None or model in replica.spec.models or model in replica.listed_models:
            return True
        return self._takes_any(replica) and not (replica.listed_models and model in self._listed)

    def _takes_any(self, replica: Replica) -> bool:
        """Return whether a replica is sent names that no replica lists: its models are neither configured nor listed.

        Where one model alone is served, its replicas take any name: clients send all kinds, and engines answer them.
        Once there are two, a name that is not known is wrong, and the answer would be that of any model.
        """
        return not replica.spec.models and not (replica.listed_models and len(self._listed) > 1)


def _why_ejected(replica: Replica) -> str:
    why = replica.last_failure
    return "ejected" if why is None else f"ejected: {why}"


def _is_available(replica: Replica) -> bool:
    return not replica.draining and replica.health.state is HealthState.HEALTHY


def _rows(replicas: Sequence[Replica], is_all: bool, excluded: Mapping[str, str], *, panic: bool) -> CandidateSet:
    slots = np.array([replica.slot for replica in replicas], dtype=np.intp)
    return CandidateSet(replicas, slots, tuple(replica.spec.name for replica in replicas), is_all, excluded, panic)
