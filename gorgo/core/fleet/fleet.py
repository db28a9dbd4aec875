"""The fleet: replicas by name, the columns that policies read, and what goes stale.

Owns slots, the cells of loads, probes and scrapes, drain marks, and the times at which values go stale or back-offs
end. See `replica` for the state of one, `eligibility` for the filter, `columns` for the cells and those of connections.

- `FleetTimers` finds the earliest time of all replicas.
- `ewma` and `is_stale` turn noisy figures into those that a policy sees.
- `Fleet` has the replicas.

Theory of operation: every replica has a slot, an index into all columns, from the day it joins until it leaves; a free
slot is used again. Events write single cells; nothing is rebuilt for a request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from functools import partial
from heapq import heapify, heappop, heappush
from math import inf, nan
from types import MappingProxyType
from typing import Protocol

from gorgo.core.fleet.eligibility import EligibilityFilter
from gorgo.core.fleet.peer_loads import PeerLoads
from gorgo.core.fleet.replica import Columns, HealthState, Replica, ReplicaSpec
from gorgo.core.latency.prefill import with_prefill
from gorgo.core.limits import OutlierLimits
from gorgo.core.messages.actions import FleetEvent, HealthChanged, RegionChanged
from gorgo.core.messages.request import EngineSample
from gorgo.errors import ConfigError, UnknownReplica


class FleetTimers:
    """One time per replica, which may be replaced.

    `next_s` is the earliest. A heap has each time that was set; one that was replaced is dropped when it comes to the
    front, or when more than half of the heap is obsolete.
    """

    __slots__ = ("_due", "_heap", "_number", "next_s")

    def __init__(self) -> None:
        self._due: dict[Replica, float] = {}
        self._heap: list[tuple[float, int, Replica]] = []
        self._number = 0
        #: Read at each event of a request, and changed by probes and scrapes alone.
        self.next_s: float | None = None

    def set(self, replica: Replica, due_s: float | None) -> None:
        """Replace a replica's time; `None` is none."""
        if due_s == self._due.get(replica):
            return
        if due_s is None:
            del self._due[replica]
            self.next_s = self._earliest_s()
            return
        self._due[replica] = due_s
        self._number += 1
        heappush(self._heap, (due_s, self._number, replica))
        if len(self._heap) > 64 + 2 * len(self._due):
            self._heap = [entry for entry in self._heap if self._due.get(entry[2]) == entry[0]]
            heapify(self._heap)
        self.next_s = self._earliest_s()

    def pop_due(self, *, now: float) -> Iterable[Replica]:
        """Remove the times until `now`; return their replicas in the order of slots."""
        due: list[Replica] = []
        while self.next_s is not None and self.next_s <= now:
            replica = heappop(self._heap)[2]
            del self._due[replica]
            due.append(replica)
            self.next_s = self._earliest_s()
        return sorted(due, key=lambda replica: replica.slot)

    def _earliest_s(self) -> float | None:
        heap = self._heap
        while heap:
            due_s, _, replica = heap[0]
            if self._due.get(replica) == due_s:
                return due_s
            heappop(heap)
        return None


# What turns noisy figures into the ones that a policy sees: smoothing and age.
#
# Owns the two rules; the fleet owns the cells that they write. Unknown is NaN.


def ewma(previous: float, sample: float, alpha: float) -> float:
    """Exponentially weighted moving average; the first sample stands for itself.

    Parameters
    ----------
    previous:
        The average so far, NaN before the first sample.
    alpha:
        Weight of the new sample, in (0, 1]; 1 keeps no memory.

    Example
    -------
    >>> ewma(float("nan"), 0.2, 0.3), round(ewma(0.1, 0.2, 0.3), 3)
    (0.2, 0.13)
    """
    if previous != previous:  # NaN is the only number unequal to itself
        return sample
    return previous + alpha * (sample - previous)


def is_stale(observed_s: float | None, *, now: float, after_s: float) -> bool:
    """Return whether a signal observed at `observed_s` is too old to use. None is unknown, not stale."""
    return observed_s is not None and now >= observed_s + after_s


#: Of probes so soon after the first answered one a shorter one counts alone, s: they come a second apart.
FIRST_PROBES_S = 5.0
#: Events retained for a shell that takes none, as the simulation.
MAX_EVENTS = 1000
#: Reported by the engine's metrics; unknown again when stale.
_SCRAPED = ("running_requests", "queued_requests", "used_tokens")


class HealthObserver(Protocol):
    def __call__(self, replica: Replica, *, now: float) -> None: ...


@dataclass(frozen=True, slots=True)
class FleetChange:
    """Result of `Fleet.replace`; slots of replicas that left may belong to replicas that joined."""

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
        Share of healthy replicas below which those ejected for failed attempts are tried again soon: a failure
        everywhere is rarely the replica's fault. With none healthy, ejection is ignored. 0 turns both off.
    ejection:
        When a replica is ejected and for how long.
    """

    stale_after_s: float
    rtt_ewma_alpha: float
    panic_threshold: InitVar[float]
    ejection: OutlierLimits
    columns: Columns = field(default_factory=Columns.empty)
    replicas: dict[str, Replica] = field(default_factory=dict)
    #: The filter before any cost.
    eligibility: EligibilityFilter = field(init=False)
    #: Changes that the shell has not taken yet.
    events: deque[FleetEvent] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    #: Replicas that were probed and have never answered: how far they are is unknown.
    unprobed: dict[Replica, None] = field(default_factory=dict)
    #: Replicas that are sent hot prompts before their first request.
    warming: dict[Replica, None] = field(default_factory=dict)
    #: Replicas that look much slower than their priors.
    slow: dict[Replica, None] = field(default_factory=dict)
    #: Replicas that do several prefills at once.
    parallel: dict[Replica, None] = field(default_factory=dict)
    #: Replicas whose KV pools are taken by half or more.
    contended: dict[Replica, None] = field(default_factory=dict)
    #: When a request without a visible first token arrives at its engine, the last one of all.
    unseen_s: float = -inf
    #: Load that other routers report; `None` without peers.
    peers: PeerLoads | None = None
    #: Called with a replica that outlier detection readmits, and with one that it ejects.
    on_readmitted: HealthObserver | None = None
    on_ejected: HealthObserver | None = None
    _free: list[int] = field(default_factory=list)
    #: When a value of a replica goes stale or its back-off ends.
    #: When a value goes stale or a back-off ends.
    timers: FleetTimers = field(default_factory=FleetTimers)

    def __post_init__(self, panic_threshold: float) -> None:
        self.eligibility = EligibilityFilter(self.replicas, self.columns, panic_threshold=panic_threshold)

    # -- membership

    def replace(self, specs: Sequence[ReplicaSpec]) -> FleetChange:
        """Replace the fleet. A replica that stays keeps slot, columns, marks and health."""
        wanted = {spec.name: spec for spec in specs}
        if len(wanted) != len(specs):
            raise ConfigError("two replicas have the same name; expected one name per replica")
        left = [self._leave(name) for name in list(self.replicas) if name not in wanted]
        for name, replica in self.replicas.items():
            replica.update(wanted[name])
        joining = [spec for name, spec in wanted.items() if name not in self.replicas]
        self._add_slots(len(joining) - len(self._free))
        joined = [self._join(spec) for spec in joining]
        self.eligibility.on_models_change()
        self._set_timers()
        return FleetChange(joined, left)

    def member(self, name: str) -> Replica:
        try:
            return self.replicas[name]
        except KeyError:
            raise UnknownReplica(f"no replica named {name!r}; the fleet has: {', '.join(self.replicas)}") from None

    def drain(self, name: str, draining: bool, *, now: float) -> None:
        replica = self.member(name)
        if draining != replica.draining:
            replica.draining, replica.drained_s = draining, now if draining else None
        if self.eligibility.on_change(replica):
            self._set_timers()

    def set_limits(
        self, *, stale_after_s: float, rtt_ewma_alpha: float, panic_threshold: float, ejection: OutlierLimits
    ) -> None:
        self.stale_after_s, self.rtt_ewma_alpha, self.ejection = stale_after_s, rtt_ewma_alpha, ejection
        for replica in self.replicas.values():
            replica.health.limits = ejection
        self.eligibility.panic_threshold = panic_threshold
        self.eligibility.invalidate()
        self._set_timers()

    def list_models(
        self, replica: Replica, models: tuple[str, ...], contexts: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        """Record the models that an engine lists, and their contexts where it says them, tokens."""
        if models != replica.listed_models or contexts != replica.contexts:
            replica.listed_models, replica.contexts = models, contexts
            if self.eligibility.on_models_change():
                self._set_timers()

    def _on_health_change(self, replica: Replica) -> None:
        if self.eligibility.on_change(replica):
            self._set_timers()
        else:
            self._set_timer(replica)
        state = replica.health.state
        if state is replica.reported_state or replica.slot < 0:
            return
        replica.reported_state = state
        self.events.append(self._health_event(replica))
        if state is HealthState.HEALTHY:
            replica.last_failure = None
        if state is HealthState.HEALTHY and self.on_readmitted is not None:
            self.on_readmitted(replica, now=replica.health.changed_s)
        if state is HealthState.EJECTED and self.on_ejected is not None:
            self.on_ejected(replica, now=replica.health.changed_s)

    def forget_slow(self, *, now: float) -> None:
        """Let replicas that look slow, and get no work therefore, go back to their priors."""
        for replica in [replica for replica in self.slow if replica.prefill_queue.speed.aged_s != now]:
            replica.forget_speed(engine_s=now)

    @staticmethod
    def _health_event(replica: Replica) -> HealthChanged:
        name, health = replica.spec.name, replica.health
        if health.backoff_until_s is None:
            return HealthChanged(name, health.state.value)
        for_s = health.backoff_until_s - health.changed_s
        return HealthChanged(name, health.state.value, health.ejected_by, replica.last_failure, for_s)

    # -- load, written by the in-flight table

    def reserve(self, replica: Replica, prompt_tokens: int) -> None:
        slot, columns = replica.slot, self.columns
        # Not by `+=`, which makes numpy numbers of the cell and of the sum.
        columns.in_flight_requests[slot] = columns.in_flight_requests.item(slot) + 1
        columns.in_flight_tokens[slot] = columns.in_flight_tokens.item(slot) + prompt_tokens
        columns.queued_prefill_tokens[slot] = columns.queued_prefill_tokens.item(slot) + prompt_tokens

    def add_prefill(self, replica: Replica, prefill_s: float, *, now: float) -> None:
        """Add a predicted prefill to the share of its time that the replica prefills."""
        slot, columns = replica.slot, self.columns
        age_s = now - columns.prefill_share_s.item(slot)
        columns.prefill_share[slot] = with_prefill(columns.prefill_share.item(slot), age_s, prefill_s)
        columns.prefill_share_s[slot] = now

    def release_prefill(self, replica: Replica, prompt_tokens: int) -> None:
        slot, columns = replica.slot, self.columns
        if slot >= 0:
            columns.queued_prefill_tokens[slot] = columns.queued_prefill_tokens.item(slot) - prompt_tokens

    def release(self, replica: Replica, prompt_tokens: int) -> None:
        slot, columns = replica.slot, self.columns
        if slot >= 0:
            columns.in_flight_requests[slot] = columns.in_flight_requests.item(slot) - 1
            columns.in_flight_tokens[slot] = columns.in_flight_tokens.item(slot) - prompt_tokens

    def all_loads(self, *, now: float) -> Columns:
        """Return the columns with the load of other routers."""
        return self.columns if self.peers is None else self.peers.added_to_own(now=now)

    def others_prefill_s(self, slot: int) -> float:
        """Return the prefill that waits there for other routers, s."""
        return 0.0 if self.peers is None else self.peers.prefill_s(slot)

    def others_prefill_before_s(self, replica: Replica, *, arrives_s: float, now: float) -> float:
        """Return the prefill for other routers before a request dispatched now, but not before those queued already."""
        if self.peers is None:
            return 0.0
        queue = replica.prefill_queue
        before_s = queue.shared_left_s(engine_s=now)
        reached = len(queue) > 0 and now >= queue.head_began_s + queue.head_shared_s
        left_s = self.peers.left_s(replica.slot, own=reached, now=now)
        travels_s = 0.0 if len(queue) else max(0.0, arrives_s - now)
        return max(0.0, left_s - before_s - travels_s)

    def others_waited_until_s(self, slot: int, *, now: float) -> float:
        """Return until when a request of another router waited there for its first token."""
        return -inf if self.peers is None else self.peers.waited_until_s(slot, now=now)

    # -- probes and scrapes

    def probed(self, replica: Replica, rtt_s: float | None, *, now: float) -> None:
        replica.answers = rtt_s is not None
        if rtt_s is None:
            replica.prefill_queue.on_silence(engine_s=now)
            if replica.first_probed_s is None and replica.probe_refusal is None:
                self.unprobed[replica] = None
            replica.health.probe_failed(now=now)
            return
        if replica.first_probed_s is None:
            replica.first_probed_s = now
            self.unprobed.pop(replica, None)
        column = self.columns.rtt_s
        known_s = column.item(replica.slot)
        # Of the first probes a shorter one counts alone: the way was slow before.
        is_first = rtt_s < known_s and now - replica.first_probed_s <= FIRST_PROBES_S
        column[replica.slot] = rtt_s if is_first else ewma(known_s, rtt_s, self.rtt_ewma_alpha)
        replica.probed_s = now
        self._set_timer(replica)
        replica.health.probe_succeeded(now=now)

    def scraped(self, replica: Replica, sample: EngineSample, *, now: float) -> None:
        for name in _SCRAPED:
            value = getattr(sample, name)
            getattr(self.columns, name)[replica.slot] = nan if value is None else value
        for name in ("kv_capacity_tokens", "max_running_requests"):
            value = getattr(sample, name)
            if value is not None:
                getattr(self.columns, name)[replica.slot] = value
        if replica.reported_speed.on_counters(sample.prefill_tokens_total, sample.prefill_busy_s_total):
            self._apply_reported_speed(replica)
        replica.scraped_s = now
        self._set_timer(replica)
        self.columns.sampled_s[replica.slot] = now

    def _apply_reported_speed(self, replica: Replica) -> None:
        """Use the engine's counters as a prior where regions.yaml has none."""
        if replica.reported_speed.factor is not None and not replica.prior.known:
            replica.prefill_queue.set_speed_prior(replica.reported_speed.factor)

    # -- time

    def handle_timer(self, *, now: float) -> None:
        for replica in self.timers.pop_due(now=now):
            if is_stale(replica.probed_s, now=now, after_s=self.stale_after_s):
                self.columns.rtt_s[replica.slot], replica.probed_s = nan, None
            if is_stale(replica.scraped_s, now=now, after_s=self.stale_after_s):
                for name in (*_SCRAPED, "sampled_s"):
                    getattr(self.columns, name)[replica.slot] = nan
                replica.scraped_s = None
            replica.health.end_backoff(now=now)
            self._set_timer(replica)

    def _set_timer(self, replica: Replica) -> None:
        if replica.slot < 0:  # an attempt on it may end later
            return
        observed_s = (replica.probed_s, replica.scraped_s)
        due = [at + self.stale_after_s for at in observed_s if at is not None]
        if replica.health.backoff_until_s is not None:
            due.append(replica.health.backoff_until_s)
        self.timers.set(replica, min(due, default=None))

    def _set_timers(self) -> None:
        for replica in self.replicas.values():
            self._set_timer(replica)

    # -- helpers

    def _add_slots(self, count: int) -> None:
        if count > 0:
            first = len(self.columns.salt)
            self.columns.grow(count)
            # Behind the free ones, the lowest of them first.
            self._free[:0] = range(first + count - 1, first - 1, -1)

    def _join(self, spec: ReplicaSpec) -> Replica:
        replica = Replica.create(spec, self._free.pop(), self.columns, self.ejection)
        replica.health.on_change = partial(self._on_health_change, replica)
        replica.slow, replica.parallel, replica.contended = self.slow, self.parallel, self.contended
        self.replicas[spec.name] = replica
        return replica

    def _leave(self, name: str) -> int:
        replica = self.replicas.pop(name)
        self.unprobed.pop(replica, None)
        self.warming.pop(replica, None)
        self.slow.pop(replica, None)
        self.parallel.pop(replica, None)
        self.contended.pop(replica, None)
        self.timers.set(replica, None)
        slot, replica.slot = replica.slot, -1
        self.columns.clear(slot)
        self._free.append(slot)
        return slot


# Region outages: all replicas of a region that fail their probes together are one event.
#
# A region is unreachable when each of its replicas failed its last probe within one window: then the path is broken,
# not the engines. Waiting for three failures of each would send requests into it for minutes. So a region with several
# replicas has all of them ejected at once, with one back-off, and all are tried as soon as any answers again. A region
# with one replica is that replica: it is ejected by its own count, and the region is reported then.


class RegionOutages:
    """Finds unreachable regions.

    Parameters
    ----------
    fleet:
        The Router's.
    window_s:
        Time within which all replicas of a region must fail, s. May be replaced.
    """

    __slots__ = ("_failed_s", "_fleet", "_unreachable", "window_s")

    def __init__(self, fleet: Fleet, *, window_s: float) -> None:
        self._fleet = fleet
        self.window_s = window_s
        self._failed_s: dict[Replica, float] = {}
        self._unreachable: set[str] = set()

    @property
    def unreachable(self) -> frozenset[str]:
        return frozenset(self._unreachable)

    def probe_failed(self, replica: Replica, *, now: float) -> None:
        self._failed_s[replica] = now
        region = replica.spec.region
        replicas = list(self._of(region))
        if region in self._unreachable or not all(self._failed(other, now) for other in replicas):
            return
        if len(replicas) == 1 and replica.health.state is HealthState.HEALTHY:
            return
        self._unreachable.add(region)
        self._fleet.events.append(RegionChanged(region, reachable=False))
        if len(replicas) > 1:
            for other in replicas:
                other.health.region_unreachable(now=now)

    def probe_succeeded(self, replica: Replica, *, now: float) -> None:
        if not self._failed_s and not self._unreachable:
            return
        self._failed_s.pop(replica, None)
        region = replica.spec.region
        if region in self._unreachable:
            self._unreachable.discard(region)
            self._fleet.events.append(RegionChanged(region, reachable=True))
            replicas = list(self._of(region))
            for other in replicas if len(replicas) > 1 else ():
                other.health.region_reachable(now=now)

    def on_fleet_change(self) -> None:
        """Forget replicas that left and regions without a replica."""
        replicas = set(self._fleet.replicas.values())
        self._failed_s = {replica: at for replica, at in self._failed_s.items() if replica in replicas}
        left = self._unreachable - {replica.spec.region for replica in replicas}
        self._unreachable -= left
        self._fleet.events.extend(RegionChanged(region, reachable=True) for region in sorted(left))

    def _of(self, region: str) -> Iterator[Replica]:
        return (replica for replica in self._fleet.replicas.values() if replica.spec.region == region)

    def _failed(self, replica: Replica, now: float) -> bool:
        failed_s = self._failed_s.get(replica)
        return failed_s is not None and now - failed_s <= self.window_s
