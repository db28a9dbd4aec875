"""One replica while it is in the fleet, and what it brings along: its priors and its salt.

Owns the object that attempts hold on to, from the day the replica joins until the last of them ends. Its cells are the
fleet's, in the columns at its slot; one that has left keeps slot -1, so an attempt that ends late finds nothing to
release, even when another replica has its slot by then.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from math import nan

from gorgo.core.fleet.columns import Columns
from gorgo.core.fleet.outlier import OutlierDetector, OutlierLimits
from gorgo.core.fleet.restart_detector import RestartDetector
from gorgo.core.fleet.spec import ReplicaSpec
from gorgo.core.latency.concurrency import ConcurrencyLimit
from gorgo.core.latency.prefill import PrefillPrior
from gorgo.core.latency.prefill_queue import PrefillQueue
from gorgo.core.latency.prefill_speed import PrefillSpeed
from gorgo.core.latency.reported_speed import ReportedSpeed
from gorgo.core.latency.tcp import connect_round_trips
from gorgo.core.prefix.cache_feedback import LearnedCapacity

#: Priors from regions.yaml that an engine's own word replaces.
_CAPACITY_FIELDS = ("kv_capacity_tokens", "max_running_requests")


@dataclass(slots=True, eq=False)
class Replica:
    """One replica while it is in the fleet."""

    spec: ReplicaSpec
    slot: int
    health: OutlierDetector
    prior: PrefillPrior
    prefill_queue: PrefillQueue
    reported_speed: ReportedSpeed
    #: How many it may have in flight if answers are to end in time.
    concurrency: ConcurrencyLimit = field(default_factory=ConcurrencyLimit)
    #: For an engine that does not tell its KV capacity.
    learned_capacity: LearnedCapacity = field(default_factory=LearnedCapacity)
    #: How often its engine was seen to have started again.
    restarts: RestartDetector = field(default_factory=RestartDetector)
    draining: bool = False
    #: When the mark was set.
    drained_s: float | None = None
    probed_s: float | None = None
    scraped_s: float | None = None
    #: Attempts dispatched there, and those that failed (before or after content), since it joined.
    attempts: int = 0
    failures: int = 0

    @classmethod
    def create(cls, spec: ReplicaSpec, slot: int, columns: Columns, ejection: OutlierLimits) -> Replica:
        """A new one, with all that is known of it beforehand in its cells, which are empty."""
        prior = _prefill_prior(spec)
        member = cls(spec, slot, OutlierDetector(ejection), prior, PrefillQueue(), ReportedSpeed(prior))
        columns.salt[slot] = _salt(spec.name)
        for name in _CAPACITY_FIELDS:
            getattr(columns, name)[slot] = _known(getattr(spec, name))
        columns.connect_round_trips[slot] = connect_round_trips(tls=spec.tls)
        member._publish_prior(columns)
        return member

    def update(self, spec: ReplicaSpec, columns: Columns) -> None:
        """A changed prior counts; an unchanged one must not undo what the engine has told."""
        for name in _CAPACITY_FIELDS:
            if getattr(spec, name) != getattr(self.spec, name):
                getattr(columns, name)[self.slot] = _known(getattr(spec, name))
        self.spec = spec
        columns.connect_round_trips[self.slot] = connect_round_trips(tls=spec.tls)
        prior = _prefill_prior(spec)
        if prior != self.prior:
            # What was learned was the error of the old one.
            self.prior = prior
            self.prefill_queue.speed, self.reported_speed = PrefillSpeed(), ReportedSpeed(prior)
            self._publish_prior(columns)
            self.publish_queue(columns)

    def publish_queue(self, columns: Columns) -> None:
        """Write what the prefill queue says; after every event of it."""
        slot, clock = self.slot, self.prefill_queue
        if slot >= 0:
            columns.drained_at_s[slot] = clock.drained_at_s
            columns.head_due_s[slot] = clock.head_due_s
            columns.waiting_prefill_s[slot] = clock.backlog_s
            columns.slowdown[slot] = clock.speed.factor

    def _publish_prior(self, columns: Columns) -> None:
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
