"""Kinds of fault of a simulation: each is a record that schedules itself.

Owns what each does. Leaves to `gorgo.lab.sim.faults.injector` the interface that a fault acts on, and to
`gorgo.lab.sim.faults.scenarios` which faults a run has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol, TypeVar

from gorgo.errors import ScenarioError, UnknownReplica
from gorgo.lab.sim.faults.injector import FaultApi, Partitionable, ReportingCaches
from gorgo.lab.sim.fleet import SimFleet
from gorgo.lab.sim.kv_events import PathFaults

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
