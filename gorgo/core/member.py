"""One replica while it is in the fleet, and what it brings along: its priors and its salt.

Owns the object that attempts hold on to, from the day the replica joins until the last of them ends. Its cells are the
fleet's, in the columns at its slot; one that has left keeps slot -1, so an attempt that ends late finds nothing to
release, even when another replica has its slot by then.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from math import nan

from gorgo.core.batch_bound import BatchBound
from gorgo.core.busy_clock import BusyClock
from gorgo.core.cache_reports import LearnedCapacity
from gorgo.core.columns import Columns
from gorgo.core.health import EjectionLimits, Health
from gorgo.core.path import connect_trips
from gorgo.core.prefill import PrefillPrior
from gorgo.core.replica import ReplicaSpec
from gorgo.core.restarts import Restarts
from gorgo.core.speed import LearnedSpeed
from gorgo.core.told_speed import ToldSpeed

#: Priors from regions.yaml that an engine's own word replaces.
_SIZES = ("kv_capacity_tokens", "max_running_requests")


@dataclass(slots=True, eq=False)
class Member:
    """One replica while it is in the fleet."""

    spec: ReplicaSpec
    slot: int
    health: Health
    prior: PrefillPrior
    clock: BusyClock
    told: ToldSpeed
    #: How many it may have in flight if answers are to end in time.
    batch: BatchBound = field(default_factory=BatchBound)
    #: For an engine that does not tell its KV capacity.
    learned_capacity: LearnedCapacity = field(default_factory=LearnedCapacity)
    #: How often its engine was seen to have started again.
    restarts: Restarts = field(default_factory=Restarts)
    draining: bool = False
    #: When the mark was set.
    drained_s: float | None = None
    probed_s: float | None = None
    scraped_s: float | None = None
    #: Attempts dispatched there, and those that failed (before or after content), since it joined.
    attempts: int = 0
    failures: int = 0

    @classmethod
    def joining(cls, spec: ReplicaSpec, slot: int, columns: Columns, ejection: EjectionLimits) -> Member:
        """A new one, with all that is known of it beforehand in its cells, which are empty."""
        prior = _prefill_prior(spec)
        member = cls(spec, slot, Health(ejection), prior, BusyClock(), ToldSpeed(prior))
        columns.salt[slot] = _salt(spec.name)
        for name in _SIZES:
            getattr(columns, name)[slot] = _known(getattr(spec, name))
        columns.connect_trips[slot] = connect_trips(tls=spec.tls)
        member._show_prior(columns)
        return member

    def update(self, spec: ReplicaSpec, columns: Columns) -> None:
        """A changed prior counts; an unchanged one must not undo what the engine has told."""
        for name in _SIZES:
            if getattr(spec, name) != getattr(self.spec, name):
                getattr(columns, name)[self.slot] = _known(getattr(spec, name))
        self.spec = spec
        columns.connect_trips[self.slot] = connect_trips(tls=spec.tls)
        prior = _prefill_prior(spec)
        if prior != self.prior:
            # What was learned was the error of the old one.
            self.prior = prior
            self.clock.speed, self.told = LearnedSpeed(), ToldSpeed(prior)
            self._show_prior(columns)
            self.show_clock(columns)

    def show_clock(self, columns: Columns) -> None:
        """Write what the busy clock says; after every event of it."""
        slot, clock = self.slot, self.clock
        if slot >= 0:
            columns.free_at_s[slot] = clock.free_at_s
            columns.due_s[slot] = clock.due_s
            columns.waiting_prefill_s[slot] = clock.waiting_s
            columns.slowdown[slot] = clock.speed.factor

    def _show_prior(self, columns: Columns) -> None:
        slot, prior = self.slot, self.prior
        columns.prefill_base_s[slot] = prior.base_s
        columns.prefill_token_s[slot] = 1.0 / prior.tokens_per_s
        columns.prefill_kappa_s[slot] = prior.kappa_s


def _salt(name: str) -> int:
    """64 bits of the name, the same in every process and on every machine."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")


def _known(value: int | None) -> float:
    return nan if value is None else float(value)


def _prefill_prior(spec: ReplicaSpec) -> PrefillPrior:
    return PrefillPrior.of(spec.prefill_base_s, spec.prefill_tokens_per_s, spec.prefill_kappa_s)
