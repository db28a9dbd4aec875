"""Faults of a simulation, and named scenarios of them: what fleet, what goes wrong, how requests arrive.

Owns the kinds of fault and the table of scenarios. Leaves to `gorgo.lab.sim.faults.injector` the interface that a fault
acts on. A scenario changes a base fleet (three regions as regions.yaml has them), adds faults over the length of the
run, and may move arrivals; policies, trace and load stay the caller's. `nearest` in a description is the replica with
the shortest mean round trip.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import inf
from types import MappingProxyType
from typing import Protocol, TypeVar

import numpy as np

from gorgo.core.fleet.replica import ReplicaSpec
from gorgo.core.numeric import Floats
from gorgo.errors import ScenarioError, UnknownReplica, UnknownScenario
from gorgo.lab.sim.engine.profiles import EngineProfile, find_profile
from gorgo.lab.sim.faults.injector import FaultApi, Partitionable, ReportingCaches
from gorgo.lab.sim.fleet import SimFleet, SimReplica
from gorgo.lab.sim.kv_events.path import PathFaults

# Kinds of fault of a simulation: each is a record that schedules itself.
#
# Theory of operation. `start` runs before the first event and only puts handlers into the kernel's heap. A fault sets
# a state and sets it back when it ends; two of one kind that overlap on one replica are not added up, the later
# setting stands. Every fault that repeats has an end, so that the heap runs empty.


T = TypeVar("T")


class Fault(Protocol):
    """Something that goes wrong."""

    def start(self, world: FaultApi) -> None:
        """Put its events into the world's heap; raises `UnknownReplica` or `ScenarioError` without a target."""


@dataclass(frozen=True, slots=True)
class Slow:
    """Every step of a replica takes `factor` times as long."""

    replica: str
    factor: float
    start_s: float
    end_s: float = inf

    def start(self, world: FaultApi) -> None:
        _replica(world, self.replica)
        _set_between(world, world.set_slowdown, self.replica, (self.factor, 1.0), self.start_s, self.end_s)


@dataclass(frozen=True, slots=True)
class RttShift:
    """The way to a region is another one for a while."""

    region: str
    rtt_s: float
    start_s: float
    end_s: float = inf

    def start(self, world: FaultApi) -> None:
        usual_s = region_rtt_s(world.fleet, self.region)
        _set_between(world, world.set_rtt, self.region, (self.rtt_s, usual_s), self.start_s, self.end_s)


@dataclass(frozen=True, slots=True)
class Kill:
    """A replica goes, with all that runs there, and comes back cold."""

    replica: str
    start_s: float
    end_s: float = inf

    def start(self, world: FaultApi) -> None:
        _replica(world, self.replica)
        _from_to(world, self.start_s, lambda: world.kill(self.replica), self.end_s, lambda: world.revive(self.replica))


@dataclass(frozen=True, slots=True)
class Hang:
    """A replica stands still with open connections, and comes back cold."""

    replica: str
    start_s: float
    end_s: float = inf

    def start(self, world: FaultApi) -> None:
        _replica(world, self.replica)
        world.kernel.at(self.start_s, lambda: world.hang(self.replica))
        if self.end_s < inf:
            Kill(self.replica, self.end_s, self.end_s).start(world)


@dataclass(frozen=True, slots=True)
class Drain:
    """A replica gets no new requests, and its streams go on elsewhere."""

    replica: str
    start_s: float
    end_s: float = inf

    def start(self, world: FaultApi) -> None:
        _replica(world, self.replica)
        _set_between(world, world.set_draining, self.replica, (True, False), self.start_s, self.end_s)


@dataclass(frozen=True, slots=True)
class FailFast:
    """A replica answers each request with an error status at once, and its probes as before."""

    replica: str
    status: int
    start_s: float
    end_s: float = inf

    def start(self, world: FaultApi) -> None:
        _replica(world, self.replica)
        _set_between(world, world.set_failing, self.replica, (self.status, None), self.start_s, self.end_s)


@dataclass(frozen=True, slots=True)
class StaleMetrics:
    """A replica, or all, report no load."""

    replica: str | None
    start_s: float
    end_s: float = inf

    def start(self, world: FaultApi) -> None:
        for name in one_or_all(world, self.replica):
            _set_between(world, world.set_metrics, name, (False, True), self.start_s, self.end_s)


@dataclass(frozen=True, slots=True)
class StaleProbes:
    """Pings of a replica, or of all, are not answered; requests are."""

    replica: str | None
    start_s: float
    end_s: float = inf

    def start(self, world: FaultApi) -> None:
        for name in one_or_all(world, self.replica):
            _set_between(world, world.set_probes, name, (False, True), self.start_s, self.end_s)


@dataclass(frozen=True, slots=True)
class Partition:
    """A region is unreachable. If the simulation can only kill, its replicas restart cold."""

    region: str
    start_s: float
    end_s: float = inf

    def start(self, world: FaultApi) -> None:
        cut, mend = _cutting(world)
        for replica in replicas_in(world.fleet, self.region):
            _each_fault(world, self.start_s, cut, replica)
            _each_fault(world, self.end_s, mend, replica)


@dataclass(frozen=True, slots=True)
class PeriodicStall:
    """A replica all but stops for a while, again and again, until `end_s`; first a whole period after `start_s`."""

    replica: str
    end_s: float
    factor: float = 40.0
    lasts_s: float = 8.0
    every_s: float = 100.0
    start_s: float = 0.0

    def start(self, world: FaultApi) -> None:
        _replica(world, self.replica)
        if not 0 < self.lasts_s < self.every_s or self.end_s == inf:
            raise ScenarioError(f"{self!r}: expected 0 < lasts_s < every_s and an end")
        self._next(world, self.start_s + self.every_s)

    def _next(self, world: FaultApi, at_s: float) -> None:
        """One period at a time is in the heap."""
        if at_s < self.end_s:
            Slow(self.replica, self.factor, at_s, min(at_s + self.lasts_s, self.end_s)).start(world)
            world.kernel.at(at_s, lambda: self._next(world, at_s + self.every_s))


@dataclass(frozen=True, slots=True)
class DelaySpikes:
    """A share of the requests to a region gets stuck on its way for `low_s` to `high_s`."""

    region: str
    share: float = 0.015
    low_s: float = 1.0
    high_s: float = 3.0
    start_s: float = 0.0
    end_s: float = inf

    def start(self, world: FaultApi) -> None:
        replicas_in(world.fleet, self.region)
        _from_to(
            world,
            self.start_s,
            lambda: world.set_path_delay(self.region, self.share, self.low_s, self.high_s),
            self.end_s,
            lambda: world.set_path_delay(self.region, 0.0, 0.0, 0.0),
        )


def replicas_in(fleet: SimFleet, region: str) -> list[str]:
    """Names of a region's replicas; raises `ScenarioError` if there is none."""
    names = [replica.name for replica in fleet.replicas if replica.region == region]
    if not names:
        regions = dict.fromkeys(replica.region for replica in fleet.replicas)
        raise ScenarioError(f"no replica in region {region!r}; the fleet has replicas in: {', '.join(regions)}")
    return names


def region_rtt_s(fleet: SimFleet, region: str) -> float:
    """Mean round trip to a region as the fleet has it; raises `ScenarioError` for a region without replicas."""
    first = replicas_in(fleet, region)[0]
    return next(replica.link.rtt_s for replica in fleet.replicas if replica.name == first)


def one_or_all(world: FaultApi, replica: str | None) -> Sequence[str]:
    """Return the replica, or all of the fleet for `None`; raises `UnknownReplica`."""
    return [each.name for each in world.fleet.replicas] if replica is None else [_replica(world, replica)]


# -- helpers


def _from_to(world: FaultApi, start_s: float, begin: Callable[[], None], end_s: float, end: Callable[[], None]) -> None:
    world.kernel.at(start_s, begin)
    if end_s < inf:
        world.kernel.at(end_s, end)


def _each_fault(world: FaultApi, at_s: float, act: Callable[[str], None], replica: str) -> None:
    if at_s < inf:
        world.kernel.at(at_s, lambda: act(replica))


def _set_between(
    world: FaultApi, set_value: Callable[[str, T], None], name: str, values: tuple[T, T], start_s: float, end_s: float
) -> None:
    """Set a value of a replica or region at the start, and its usual one at the end."""
    value, usual = values
    _from_to(world, start_s, lambda: set_value(name, value), end_s, lambda: set_value(name, usual))


def _cutting(world: FaultApi) -> tuple[Callable[[str], None], Callable[[str], None]]:
    if isinstance(world, Partitionable):
        severable = world
        return lambda replica: severable.set_reachable(replica, False), lambda replica: severable.set_reachable(
            replica, True
        )
    return world.kill, world.revive


def _replica(world: FaultApi, name: str) -> str:
    names = [replica.name for replica in world.fleet.replicas]
    if name not in names:
        raise UnknownReplica(f"no replica named {name!r}; the fleet has: {', '.join(names)}")
    return name


#: A faster engine, for a fleet that has both.
OTHER_PROFILE = "1xH100-Qwen3.5-35B-A3B-FP8"
SHIFTED_REGION, SHIFTED_RTT_S = "eu-frankfurt", 0.320
LOCAL_RTT_S = 0.002
#: Requests of each period arrive in its first seconds.
BURST_EVERY_S, BURST_LASTS_S = 30.0, 5.0
#: After the last arrival requests may run on; faults that repeat go on so long, s.
_DRAIN_S = 600.0


def _same(fleet: SimFleet) -> SimFleet:
    return fleet


def _none(_fleet: SimFleet, _duration_s: float) -> Sequence[Fault]:
    return ()


def _as_they_are(arrivals_s: Floats) -> Floats:
    return arrivals_s


@dataclass(frozen=True, slots=True)
class Scenario:
    """One named variation of a run.

    Parameters
    ----------
    description:
        What happens, in a line of the README's table.
    fleet:
        From the base fleet to the one that runs; raises `ScenarioError` if the base lacks what it needs.
    faults:
        What goes wrong in a run of so many seconds on that fleet; raises `ScenarioError` likewise.
    reshape:
        From arrival times (ascending, s) to others, as many and as many per second on average, still ascending.
    """

    name: str
    description: str
    fleet: Callable[[SimFleet], SimFleet] = _same
    faults: Callable[[SimFleet, float], Sequence[Fault]] = _none
    reshape: Callable[[Floats], Floats] = _as_they_are


def find_scenario(name: str) -> Scenario:
    """The scenario of that name; raises `UnknownScenario`, which lists the names there are.

    Example
    -------
    >>> find_scenario("steady").reshape(np.array([0.0, 31.0])).tolist()
    [0.0, 31.0]
    """
    try:
        return SCENARIOS[name]
    except KeyError:
        raise UnknownScenario(f"no scenario named {name!r}; there are: {', '.join(SCENARIOS)}") from None


def nearest(fleet: SimFleet) -> SimReplica:
    """The replica with the shortest mean round trip, the first of equals."""
    return min(fleet.replicas, key=lambda replica: replica.link.rtt_s)


def with_accurate_priors(fleet: SimFleet) -> SimFleet:
    """The same fleet, the Router told of each replica what its engine is: KV pool, batch, time of a prefill."""
    return _each(fleet, lambda replica: _with_reported(replica, replica.profile))


def burst(arrivals_s: Floats, *, every_s: float = BURST_EVERY_S, lasts_s: float = BURST_LASTS_S) -> Floats:
    """Arrivals of each `every_s` moved into its first `lasts_s`, in order.

    Example
    -------
    >>> burst(np.array([0.0, 15.0, 45.0])).tolist()
    [0.0, 2.5, 32.5]
    """
    period = np.floor(arrivals_s / every_s) * every_s
    moved: Floats = period + (arrivals_s - period) * (lasts_s / every_s)
    return moved


# -- fleets


def _each(fleet: SimFleet, change: Callable[[SimReplica], SimReplica]) -> SimFleet:
    return replace(fleet, replicas=tuple(map(change, fleet.replicas)))


def _with_reported(replica: SimReplica, profile: EngineProfile, *, faster: float = 1.0) -> SimReplica:
    """Return a replica whose configured profile is `profile` with prefills `faster` times as fast."""
    spec = replace(
        replica.spec,
        kv_capacity_tokens=profile.kv_tokens,
        max_running_requests=profile.max_running_requests,
        prefill_base_s=profile.prefill_base_s / faster,
        prefill_tokens_per_s=profile.prefill_tokens_per_s * faster,
        prefill_kappa_s=profile.prefill_kappa_s / faster,
    )
    return replace(replica, spec=spec)


def _with_priors(faster: float) -> Callable[[SimFleet], SimFleet]:
    return lambda fleet: _each(fleet, lambda replica: _with_reported(replica, replica.profile, faster=faster))


def _mixed(fleet: SimFleet) -> SimFleet:
    """The second nearest replica is the faster one: what is near and what is fast are not the same."""
    if len(fleet.replicas) < 2:
        raise ScenarioError("scenario 'mixed-fleet' needs two replicas; the fleet has one")
    chosen = sorted(fleet.replicas, key=lambda replica: replica.link.rtt_s)[1]
    faster = find_profile(OTHER_PROFILE)
    changed = _each(fleet, lambda replica: replace(replica, profile=faster) if replica is chosen else replica)
    return with_accurate_priors(changed)


def _finding(*, hit_share: float = 1.0, checkpoint_tokens: int = 1) -> Callable[[SimFleet], SimFleet]:
    """Engines that find part of each cached prefix; the Router is not configured with it."""

    def changed(replica: SimReplica) -> SimReplica:
        profile = replace(replica.profile, hit_share=hit_share, checkpoint_tokens=checkpoint_tokens)
        return replace(replica, profile=profile)

    return lambda fleet: _each(fleet, changed)


def _two_per_region(fleet: SimFleet) -> SimFleet:
    """A region with one replica gets another like it."""
    taken = {replica.name for replica in fleet.replicas}
    replicas = list(fleet.replicas)
    for replica in fleet.replicas:
        if sum(each.region == replica.region for each in replicas) < 2:
            name = next(name for n in count() if (name := f"{replica.region}-{n}") not in taken)
            taken.add(name)
            replicas.append(replace(replica, spec=replace(replica.spec, name=name)))
    return replace(fleet, replicas=tuple(replicas))


def _one_region(fleet: SimFleet) -> SimFleet:
    region = nearest(fleet).region

    def moved(replica: SimReplica) -> SimReplica:
        spec: ReplicaSpec = replace(replica.spec, region=region)
        return replace(replica, spec=spec, link=replace(replica.link, rtt_s=LOCAL_RTT_S))

    return _each(fleet, moved)


# -- faults


def _slow_nearest(fleet: SimFleet, duration_s: float) -> Sequence[Fault]:
    return [Slow(nearest(fleet).name, 3.0, duration_s / 3, duration_s * 2 / 3)]


def _rtt_shift(fleet: SimFleet, duration_s: float) -> Sequence[Fault]:
    region_rtt_s(fleet, SHIFTED_REGION)  # says so if nobody is there
    return [RttShift(SHIFTED_REGION, SHIFTED_RTT_S, duration_s / 2)]


def _killed(fleet: SimFleet, duration_s: float) -> Sequence[Fault]:
    return [Kill(nearest(fleet).name, duration_s / 3, duration_s / 2)]


def _hung(fleet: SimFleet, duration_s: float) -> Sequence[Fault]:
    return [Hang(nearest(fleet).name, duration_s / 3, duration_s / 2)]


def _drained(fleet: SimFleet, duration_s: float) -> Sequence[Fault]:
    return [Drain(nearest(fleet).name, duration_s / 3, duration_s / 2)]


def _stale(_fleet: SimFleet, duration_s: float) -> Sequence[Fault]:
    start_s, end_s = duration_s / 3, duration_s * 2 / 3
    return [StaleMetrics(None, start_s, end_s), StaleProbes(None, start_s, end_s)]


def _periodic_stalls(fleet: SimFleet, duration_s: float) -> Sequence[Fault]:
    return [PeriodicStall(nearest(fleet).name, duration_s + _DRAIN_S)]


def _late_path(fleet: SimFleet, _duration_s: float) -> Sequence[Fault]:
    return [DelaySpikes(region) for region in dict.fromkeys(replica.region for replica in fleet.replicas)]


_TABLE = (
    Scenario("steady", "nothing goes wrong"),
    Scenario("slow-replica", "the nearest replica is 3x slower for the middle third of the run", faults=_slow_nearest),
    Scenario("rtt-shift", "the round trip to `eu-frankfurt` becomes 320 ms half way through", faults=_rtt_shift),
    Scenario("killed", "the nearest replica is down from a third to a half of the run, then back cold", faults=_killed),
    Scenario("hung", "the nearest replica hangs from a third to a half of the run, then restarts cold", faults=_hung),
    Scenario("drained", "the nearest replica is drained with its streams, and back half way", faults=_drained),
    Scenario("stale-metrics", "no replica answers scrapes or pings in the middle third of the run", faults=_stale),
    Scenario("mixed-fleet", "the second nearest replica is one H100, with right priors for each replica", fleet=_mixed),
    Scenario("six-replicas", "a second replica in each region that has one", fleet=_two_per_region),
    Scenario("one-region", "all replicas in the nearest region, at 2 ms", fleet=_one_region),
    Scenario("bursts", "the requests of every 30 s arrive in its first 5 s", reshape=burst),
    Scenario("freezing", "the nearest replica is 40x slower for 8 s in every 100 s", faults=_periodic_stalls),
    Scenario("late-path", "1.5 % of requests are delayed by 1 to 3 s", faults=_late_path),
    Scenario("priors-fast", "priors of the prefill speed are 3x too fast", fleet=_with_priors(3.0)),
    Scenario("priors-slow", "priors of the prefill speed are 3x too slow", fleet=_with_priors(1 / 3)),
    Scenario("partial-hits-30", "engines find 30 % of each cached prefix", fleet=_finding(hit_share=0.3)),
    Scenario("partial-hits-60", "engines find 60 % of each cached prefix", fleet=_finding(hit_share=0.6)),
    Scenario(
        "checkpoints-1024",
        "engines find cached prefixes in multiples of 1,024 tokens",
        fleet=_finding(checkpoint_tokens=1024),
    ),
)

#: Every scenario by name, in the order of the README's table.
SCENARIOS: Mapping[str, Scenario] = MappingProxyType({scenario.name: scenario for scenario in _TABLE})


# Kinds of fault of what a router knows of caches: reports that fare badly, and a router that starts again.
#
# Requests are served through all of them.


_NONE = PathFaults()


@dataclass(frozen=True, slots=True)
class BadReports:
    """Reports of a replica's cache, or of all, are lost, doubled, reordered, late or cut off."""

    replica: str | None
    faults: PathFaults
    start_s: float
    end_s: float = inf

    def start(self, world: FaultApi) -> None:
        caches = _reporting(world)
        for name in one_or_all(world, self.replica):
            world.kernel.at(self.start_s, lambda name=name: caches.set_report_faults(name, self.faults))  # type: ignore[misc]
            if self.end_s < inf:
                world.kernel.at(self.end_s, lambda name=name: caches.set_report_faults(name, _NONE))  # type: ignore[misc]


@dataclass(frozen=True, slots=True)
class RouterRestart:
    """The router starts with an empty index; the engines are warm."""

    at_s: float

    def start(self, world: FaultApi) -> None:
        world.kernel.at(self.at_s, _reporting(world).restart_router)


def _reporting(world: FaultApi) -> ReportingCaches:
    if not isinstance(world, ReportingCaches):
        raise ScenarioError("expected a simulation whose engines report their caches")
    return world
