"""The replicas and what is known of each: who they are, the columns that policies read, and what has gone stale.

Owns slots, the cells of loads, probes and scrapes, drain marks, and the times at which figures go stale or back-offs
end. What one replica brings along is `member`, who may serve a request `eligible`, the way to an engine `way`. Leaves
the prefix index and the ledger of open attempts to the Router.

Theory of operation: every replica has a slot, an index into all columns, from the day it joins until it leaves; a free
slot is used again. Events write single cells; nothing is rebuilt for a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from math import nan

from gorgo.core.fleet.columns import Columns
from gorgo.core.fleet.eligibility import EligibilityFilter
from gorgo.core.fleet.estimators import ewma, is_stale
from gorgo.core.fleet.outlier import OutlierLimits
from gorgo.core.fleet.replica import Replica
from gorgo.core.fleet.spec import ReplicaSpec
from gorgo.core.messages.request import EngineSample
from gorgo.errors import ConfigError, UnknownReplica

#: Told by the engine's metrics; unknown again when stale.
_SCRAPED = ("running_requests", "queued_requests", "used_tokens")


@dataclass(frozen=True, slots=True)
class FleetChange:
    """What `Fleet.replace` did; slots of those who left may belong to those who joined."""

    joined: Sequence[Replica] = ()
    left_slots: Sequence[int] = ()


@dataclass(slots=True, kw_only=True)
class Fleet:
    """All replicas.

    Parameters
    ----------
    stale_after_s:
        Age at which a probe or a scrape counts as unknown, s.
    rtt_ewma_alpha:
        Weight of a new probe in the smoothed round trip.
    panic_threshold:
        Share of healthy replicas under which those ejected for failed attempts are tried again soon, because what fails
        everywhere is rarely the replica's fault; with nobody healthy ejection is ignored. 0 never does either.
    ejection:
        When a replica is ejected and for how long.
    """

    stale_after_s: float
    rtt_ewma_alpha: float
    panic_threshold: InitVar[float]
    ejection: OutlierLimits
    columns: Columns = field(default_factory=Columns.empty)
    replicas: dict[str, Replica] = field(default_factory=dict)
    #: Who may serve a request.
    eligibility: EligibilityFilter = field(init=False)
    _free: list[int] = field(default_factory=list)
    _due: float | None = None
    _due_known: bool = False

    def __post_init__(self, panic_threshold: float) -> None:
        self.eligibility = EligibilityFilter(self.replicas, self.columns, panic_threshold=panic_threshold)

    # -- membership

    def replace(self, specs: Sequence[ReplicaSpec]) -> FleetChange:
        """Make the fleet what `specs` says. Who stays keeps slot, columns, marks and health."""
        wanted = {spec.name: spec for spec in specs}
        if len(wanted) != len(specs):
            raise ConfigError("two replicas have the same name; a name stands for one replica")
        left = [self._leave(name) for name in list(self.replicas) if name not in wanted]
        for name, member in self.replicas.items():
            member.update(wanted[name], self.columns)
        joined = [self._join(spec) for name, spec in wanted.items() if name not in self.replicas]
        self.eligibility.on_fleet_change(specs)
        self._due_known = False
        return FleetChange(joined, left)

    def member(self, name: str) -> Replica:
        try:
            return self.replicas[name]
        except KeyError:
            raise UnknownReplica(f"no replica named {name!r}; the fleet has: {', '.join(self.replicas)}") from None

    def drain(self, name: str, draining: bool, *, now: float) -> None:
        member = self.member(name)
        if draining != member.draining:
            member.draining, member.drained_s = draining, now if draining else None
        self.invalidate(True)

    def set_limits(
        self, *, stale_after_s: float, rtt_ewma_alpha: float, panic_threshold: float, ejection: OutlierLimits
    ) -> None:
        self.stale_after_s, self.rtt_ewma_alpha, self.ejection = stale_after_s, rtt_ewma_alpha, ejection
        for member in self.replicas.values():
            member.health.limits = ejection
        self.eligibility.panic_threshold = panic_threshold
        self.invalidate(True)

    def invalidate(self, changed: bool) -> None:
        """Pass on what a `OutlierDetector` event answered, or that there are others to be healthy."""
        if changed:
            self.eligibility.invalidate()
            self._due_known = False

    # -- load, written by the Router's ledger

    def reserve(self, member: Replica, prompt_tokens: int) -> None:
        slot, columns = member.slot, self.columns
        columns.in_flight_requests[slot] += 1
        columns.in_flight_tokens[slot] += prompt_tokens
        columns.queued_prefill_tokens[slot] += prompt_tokens

    def release_prefill(self, member: Replica, prompt_tokens: int) -> None:
        if member.slot >= 0:
            self.columns.queued_prefill_tokens[member.slot] -= prompt_tokens

    def release(self, member: Replica, prompt_tokens: int) -> None:
        if member.slot >= 0:
            self.columns.in_flight_requests[member.slot] -= 1
            self.columns.in_flight_tokens[member.slot] -= prompt_tokens

    # -- what probes and scrapes tell

    def probed(self, member: Replica, rtt_s: float | None, *, now: float) -> None:
        if rtt_s is None:
            self.invalidate(member.health.probe_failed(now=now))
            return
        column = self.columns.rtt_s
        column[member.slot] = ewma(float(column[member.slot]), rtt_s, self.rtt_ewma_alpha)
        member.probed_s, self._due_known = now, False
        self.invalidate(member.health.probe_succeeded(now=now))

    def scraped(self, member: Replica, sample: EngineSample, *, now: float) -> None:
        for name in _SCRAPED:
            value = getattr(sample, name)
            getattr(self.columns, name)[member.slot] = nan if value is None else value
        for name in ("kv_capacity_tokens", "max_running_requests"):
            value = getattr(sample, name)
            if value is not None:
                getattr(self.columns, name)[member.slot] = value
        if member.reported_speed.on_counters(sample.prefill_tokens_total, sample.prefill_busy_s_total):
            self._apply_reported_speed(member)
        member.scraped_s, self._due_known = now, False

    def _apply_reported_speed(self, member: Replica) -> None:
        """The engine's own account is as good as a prior from regions.yaml, and does not overrule one."""
        if member.reported_speed.factor is not None and not member.prior.known:
            member.prefill_queue.speed.set_prior(member.reported_speed.factor)
            member.publish_queue(self.columns)

    # -- time

    def next_timer(self) -> float | None:
        """When something goes stale or an ejection ends. Kept between events: a shell may ask after each."""
        if not self._due_known:
            due = [due for member in self.replicas.values() for due in self._deadlines(member)]
            self._due, self._due_known = min(due, default=None), True
        return self._due

    def handle_timer(self, *, now: float) -> None:
        self._due_known = False
        for member in self.replicas.values():
            if is_stale(member.probed_s, now=now, after_s=self.stale_after_s):
                self.columns.rtt_s[member.slot], member.probed_s = nan, None
            if is_stale(member.scraped_s, now=now, after_s=self.stale_after_s):
                for name in _SCRAPED:
                    getattr(self.columns, name)[member.slot] = nan
                member.scraped_s = None
            self.invalidate(member.health.end_backoff(now=now))

    def _deadlines(self, member: Replica) -> list[float]:
        seen = (member.probed_s, member.scraped_s)
        due = [at + self.stale_after_s for at in seen if at is not None]
        return due if member.health.backoff_until_s is None else [*due, member.health.backoff_until_s]

    # -- helpers

    def _join(self, spec: ReplicaSpec) -> Replica:
        if not self._free:
            self.columns.grow()
            self._free.append(len(self.columns.salt) - 1)
        member = Replica.create(spec, self._free.pop(), self.columns, self.ejection)
        self.replicas[spec.name] = member
        return member

    def _leave(self, name: str) -> int:
        member = self.replicas.pop(name)
        slot, member.slot = member.slot, -1
        self.columns.clear(slot)
        self._free.append(slot)
        return slot
