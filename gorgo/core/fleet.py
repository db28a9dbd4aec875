"""The replicas and what is known of each: kept columns, marks, health, and who is eligible.

Owns the cells that policies read and the cached answer to "who may serve this model now". Leaves the prefix index and
the ledger of open attempts to the Router.

Theory of operation: every replica has a slot, an index into all columns, from the day it joins until it leaves; a free
slot is used again. Events write single cells; nothing is rebuilt for a request. Who is eligible is worked out once per
model and forgotten at the next event that could change it. A `Member` that has left keeps slot -1, so an attempt that
ends late finds nothing to release, even when another replica has its slot by then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import inf, nan

import numpy as np
from numpy.typing import NDArray

from gorgo.core.batch_bound import BatchBound
from gorgo.core.busy_clock import BusyClock
from gorgo.core.cache_reports import LearnedCapacity
from gorgo.core.columns import Columns
from gorgo.core.estimators import ewma, is_stale
from gorgo.core.health import EjectionLimits, Health, HealthState
from gorgo.core.path import (
    INITIAL_WINDOW_BYTES,
    RECEIVE_WINDOW_BYTES,
    Pacing,
    Windows,
    congestion_now,
    connect_trips,
    trips_of_one,
)
from gorgo.core.prefill import PrefillPrior
from gorgo.core.replica import ReplicaSpec
from gorgo.core.request import EngineSample, OpenConnection
from gorgo.core.speed import LearnedSpeed
from gorgo.core.told_speed import ToldSpeed
from gorgo.errors import ConfigError, UnknownReplica

#: Told by the engine's metrics; unknown again when stale.
_SCRAPED = ("running_requests", "queued_requests", "used_tokens")


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
    draining: bool = False
    #: When the mark was set.
    drained_s: float | None = None
    probed_s: float | None = None
    scraped_s: float | None = None
    #: Attempts dispatched there, and those that failed (before or after content), since it joined.
    attempts: int = 0
    failures: int = 0


@dataclass(frozen=True, slots=True)
class Eligible:
    """Who may serve a model now, one row each in slot order, and why the others may not."""

    members: Sequence[Member]
    slots: NDArray[np.intp]
    names: Sequence[str]
    #: The rows are all slots of the columns, in order.
    whole: bool
    excluded: Mapping[str, str]
    #: Too few are healthy.
    panic: bool = False


@dataclass(frozen=True, slots=True)
class Change:
    """What `Fleet.replace` did; slots of those who left may belong to those who joined."""

    joined: Sequence[Member] = ()
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
    panic_threshold: float
    ejection: EjectionLimits
    columns: Columns = field(default_factory=Columns.empty)
    members: dict[str, Member] = field(default_factory=dict)
    _free: list[int] = field(default_factory=list)
    _eligible: dict[tuple[str | None, frozenset[str] | None], Eligible] = field(default_factory=dict)
    #: Models that some replica lists, and whether some replica lists none and so serves any.
    _listed: frozenset[str] = frozenset()
    _any_model: bool = False
    _due: float | None = None
    _due_known: bool = False

    # -- membership

    def replace(self, specs: Sequence[ReplicaSpec]) -> Change:
        """Make the fleet what `specs` says. Who stays keeps slot, columns, marks and health."""
        wanted = {spec.name: spec for spec in specs}
        if len(wanted) != len(specs):
            raise ConfigError("two replicas have the same name; a name stands for one replica")
        left = [self._leave(name) for name in list(self.members) if name not in wanted]
        for name, member in self.members.items():
            self._update(member, wanted[name])
        joined = [self._join(spec) for name, spec in wanted.items() if name not in self.members]
        self._listed = frozenset(model for spec in specs for model in spec.models)
        self._any_model = not all(spec.models for spec in specs)
        self._eligible.clear()
        self._due_known = False
        return Change(joined, left)

    def member(self, name: str) -> Member:
        try:
            return self.members[name]
        except KeyError:
            raise UnknownReplica(f"no replica named {name!r}; the fleet has: {', '.join(self.members)}") from None

    def drain(self, name: str, draining: bool, *, now: float) -> None:
        member = self.member(name)
        if draining != member.draining:
            member.draining, member.drained_s = draining, now if draining else None
        self._eligible.clear()

    def set_limits(self, *, stale_after_s: float, rtt_ewma_alpha: float, panic_threshold: float) -> None:
        self.stale_after_s, self.rtt_ewma_alpha = stale_after_s, rtt_ewma_alpha
        self.panic_threshold = panic_threshold
        self._eligible.clear()
        self._due_known = False

    # -- who may serve

    def serves(self, model: str | None) -> bool:
        """Whether any replica would serve `model`, well or not. An empty fleet refuses none: it may fill."""
        return not self.members or self._any_model or model is None or model in self._listed

    def eligible(self, model: str | None, regions: frozenset[str] | None = None) -> Eligible:
        """Who may serve `model`, in `regions` only. Kept until the next change: the common case is one look-up."""
        # A name that no replica lists is one group whatever it is, so clients cannot fill the cache with names.
        # Sets of regions come from the configuration.
        key = (model if model is None or model in self._listed else ""), regions
        found = self._eligible.get(key)
        if found is None:
            found = self._eligible[key] = self._filter(*key)
        return found

    def anyone_in(self, regions: frozenset[str]) -> bool:
        """Whether a replica is there, well or not. An empty fleet may fill."""
        return not self.members or any(member.spec.region in regions for member in self.members.values())

    @property
    def nobody(self) -> Eligible:
        """For a request whose one replica has left."""
        return self._rows([], dict.fromkeys(self.members, "pinned"), panic=False)

    def only(self, name: str) -> Eligible:
        """The one replica that can serve a pinned request, draining or ejected or not: nobody else could."""
        member = self.member(name)
        excluded = {other: "pinned" for other in self.members if other != name}
        return self._rows([member], excluded, panic=False)

    def without(self, eligible: Eligible, names: set[str], why: str = "tried") -> Eligible:
        """The rows of `eligible` but for those named, by default because the request has been there."""
        left = [member for member in eligible.members if member.spec.name not in names]
        return self._rows(left, {**eligible.excluded, **dict.fromkeys(names, why)}, panic=eligible.panic)

    def health_changed(self, changed: bool) -> None:
        """Pass on what a `Health` event answered."""
        if changed:
            self._eligible.clear()
            self._due_known = False
            self._hurry()

    # -- load, written by the Router's ledger

    def reserve(self, member: Member, prompt_tokens: int) -> None:
        slot, columns = member.slot, self.columns
        columns.in_flight_requests[slot] += 1
        columns.in_flight_tokens[slot] += prompt_tokens
        columns.queued_prefill_tokens[slot] += prompt_tokens

    def release_prefill(self, member: Member, prompt_tokens: int) -> None:
        if member.slot >= 0:
            self.columns.queued_prefill_tokens[member.slot] -= prompt_tokens

    def release(self, member: Member, prompt_tokens: int) -> None:
        if member.slot >= 0:
            self.columns.in_flight_requests[member.slot] -= 1
            self.columns.in_flight_tokens[member.slot] -= prompt_tokens

    def show_clock(self, member: Member) -> None:
        """Write what the member's busy clock says; after every event of it."""
        if member.slot >= 0:
            columns, slot, clock = self.columns, member.slot, member.clock
            columns.free_at_s[slot] = clock.free_at_s
            columns.due_s[slot] = clock.due_s
            columns.waiting_prefill_s[slot] = clock.waiting_s
            columns.slowdown[slot] = clock.speed.factor

    def on_path(self, member: Member, connection: OpenConnection | None) -> None:
        """What the next request to the member travels on; `None` is a connection yet to be opened.

        Whether that one will pace is told by the last one that was open: they have the same kernel.
        """
        columns, slot = self.columns, member.slot
        pacing = self._pacing(slot) and Pacing() if connection is None else connection.pacing
        columns.pace_bytes[slot], columns.burst_bytes[slot] = (inf, inf) if pacing is None else pacing
        columns.congestion_bytes[slot] = 0.0 if connection is None else connection.windows.congestion
        columns.receive_bytes[slot] = RECEIVE_WINDOW_BYTES if connection is None else connection.windows.receive
        columns.sent_s[slot] = inf if connection is None else connection.sent_s

    def arrives_s(self, member: Member, body_bytes: int, *, now: float) -> float:
        """When a request dispatched now has reached the member's engine."""
        columns, slot, one_way_s = self.columns, member.slot, self.one_way_s(member)
        congestion, pacing = float(columns.congestion_bytes[slot]), self._pacing(slot)
        if congestion == 0.0:
            trips = trips_of_one(body_bytes, Windows(), pacing) + float(columns.connect_trips[slot])
        elif (body_bytes <= INITIAL_WINDOW_BYTES and pacing is None) or congestion != congestion:
            trips = 1.0
        else:
            left = congestion_now(congestion, now - float(columns.sent_s[slot]), 2.0 * one_way_s)
            trips = trips_of_one(body_bytes, Windows(left, float(columns.receive_bytes[slot])), pacing)
        return now + one_way_s * (2.0 * trips - 1.0)

    def _pacing(self, slot: int) -> Pacing | None:
        pace = float(self.columns.pace_bytes[slot])
        return Pacing(pace, float(self.columns.burst_bytes[slot])) if pace < inf else None

    def one_way_s(self, member: Member) -> float:
        """Half a round trip; 0 while it is unknown, because a clock needs a number."""
        rtt_s = float(self.columns.rtt_s[member.slot]) if member.slot >= 0 else nan
        return 0.0 if rtt_s != rtt_s else rtt_s / 2

    # -- what probes and scrapes tell

    def probed(self, member: Member, rtt_s: float | None, *, now: float) -> None:
        if rtt_s is None:
            self.health_changed(member.health.probe_failed(now=now))
            return
        column = self.columns.rtt_s
        column[member.slot] = ewma(float(column[member.slot]), rtt_s, self.rtt_ewma_alpha)
        member.probed_s, self._due_known = now, False
        self.health_changed(member.health.probe_succeeded(now=now))

    def scraped(self, member: Member, sample: EngineSample, *, now: float) -> None:
        for name in _SCRAPED:
            value = getattr(sample, name)
            getattr(self.columns, name)[member.slot] = nan if value is None else value
        for name in ("kv_capacity_tokens", "max_running_requests"):
            value = getattr(sample, name)
            if value is not None:
                getattr(self.columns, name)[member.slot] = value
        if member.told.learn(sample.prefill_tokens_total, sample.prefill_busy_s_total):
            self._believe_speed(member)
        member.scraped_s, self._due_known = now, False

    def _believe_speed(self, member: Member) -> None:
        """The engine's own account is as good as a prior from regions.yaml, and does not overrule one."""
        if member.told.factor is not None and not member.prior.known:
            member.clock.speed.told(member.told.factor)
            self.show_clock(member)

    # -- time

    def next_timer(self) -> float | None:
        """When something goes stale or an ejection ends. Kept between events: a shell may ask after each."""
        if not self._due_known:
            due = [due for member in self.members.values() for due in self._deadlines(member)]
            self._due, self._due_known = min(due, default=None), True
        return self._due

    def handle_timer(self, *, now: float) -> None:
        self._due_known = False
        for member in self.members.values():
            if is_stale(member.probed_s, now=now, after_s=self.stale_after_s):
                self.columns.rtt_s[member.slot], member.probed_s = nan, None
            if is_stale(member.scraped_s, now=now, after_s=self.stale_after_s):
                for name in _SCRAPED:
                    getattr(self.columns, name)[member.slot] = nan
                member.scraped_s = None
            self.health_changed(member.health.wake(now=now))

    def _deadlines(self, member: Member) -> list[float]:
        seen = (member.probed_s, member.scraped_s)
        due = [at + self.stale_after_s for at in seen if at is not None]
        return due if member.health.wakes_s is None else [*due, member.health.wakes_s]

    # -- helpers

    def _filter(self, model: str | None, regions: frozenset[str] | None) -> Eligible:
        excluded: dict[str, str] = {}
        available: list[Member] = []
        for name, member in self.members.items():
            reason = _unfit(member, model, regions)
            if reason is None:
                available.append(member)
            else:
                excluded[name] = reason
        healthy = sum(member.health.state is HealthState.HEALTHY for member in available)
        panic = healthy < self.panic_threshold * len(available)
        left = [member for member in available if member.health.accepts]
        if panic and not healthy:
            guessed = [each for each in available if each.health.accepts or not each.health.unreachable]
            left = guessed or available
        staying = {member.spec.name for member in left}
        excluded |= {member.spec.name: "ejected" for member in available if member.spec.name not in staying}
        return self._rows(left, excluded, panic=panic)

    def _hurry(self) -> None:
        """In a panic whoever was ejected for failed attempts is tried again soon."""
        here = [member.health for member in self.members.values() if not member.draining]
        if sum(health.state is HealthState.HEALTHY for health in here) < self.panic_threshold * len(here):
            for health in here:
                health.hurry()

    def _rows(self, members: Sequence[Member], excluded: Mapping[str, str], *, panic: bool) -> Eligible:
        rows = sorted(members, key=lambda member: member.slot)
        slots = np.array([member.slot for member in rows], dtype=np.intp)
        whole = len(rows) == len(self.columns.salt)
        return Eligible(rows, slots, tuple(member.spec.name for member in rows), whole, excluded, panic)

    def _join(self, spec: ReplicaSpec) -> Member:
        if not self._free:
            self.columns.grow()
            self._free.append(len(self.columns.salt) - 1)
        prior = _prefill_prior(spec)
        clock = BusyClock()
        member = Member(spec, self._free.pop(), Health(self.ejection), prior, clock, ToldSpeed(prior))
        self.members[spec.name] = member
        self.columns.salt[member.slot] = _salt(spec.name)
        self.columns.kv_capacity_tokens[member.slot] = _prior(spec.kv_capacity_tokens)
        self.columns.max_running_requests[member.slot] = _prior(spec.max_running_requests)
        self.columns.connect_trips[member.slot] = connect_trips(tls=spec.tls)
        self._show_prior(member)
        return member

    def _leave(self, name: str) -> int:
        member = self.members.pop(name)
        slot, member.slot = member.slot, -1
        self.columns.clear(slot)
        self._free.append(slot)
        return slot

    def _update(self, member: Member, spec: ReplicaSpec) -> None:
        """A changed prior counts; an unchanged one must not undo what the engine has told."""
        for name in ("kv_capacity_tokens", "max_running_requests"):
            if getattr(spec, name) != getattr(member.spec, name):
                getattr(self.columns, name)[member.slot] = _prior(getattr(spec, name))
        member.spec = spec
        self.columns.connect_trips[member.slot] = connect_trips(tls=spec.tls)
        prior = _prefill_prior(spec)
        if prior != member.prior:
            # What was learned was the error of the old one.
            member.prior = prior
            member.clock.speed, member.told = LearnedSpeed(), ToldSpeed(prior)
            self._show_prior(member)
            self.show_clock(member)

    def _show_prior(self, member: Member) -> None:
        columns, slot, prior = self.columns, member.slot, member.prior
        columns.prefill_base_s[slot] = prior.base_s
        columns.prefill_token_s[slot] = 1.0 / prior.tokens_per_s
        columns.prefill_kappa_s[slot] = prior.kappa_s


def _unfit(member: Member, model: str | None, regions: frozenset[str] | None) -> str | None:
    """Why it may not serve such a request, however well it is."""
    if not _serves(member.spec, model):
        return "model"
    if regions is not None and member.spec.region not in regions:
        return "region"
    return "draining" if member.draining else None


def _serves(spec: ReplicaSpec, model: str | None) -> bool:
    return model is None or not spec.models or model in spec.models


def _salt(name: str) -> int:
    """64 bits of the name, the same in every process and on every machine."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")


def _prior(value: int | None) -> float:
    return nan if value is None else float(value)


def _prefill_prior(spec: ReplicaSpec) -> PrefillPrior:
    return PrefillPrior.of(spec.prefill_base_s, spec.prefill_tokens_per_s, spec.prefill_kappa_s)
