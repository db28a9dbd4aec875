"""Faults of a simulation: kinds, each a record that schedules itself, and what they act on.

Owns what each kind does, the lookup of replicas by name or region (`FaultInjector`), and what observers (the oracle,
policies that read engines) may see. Leaves which faults a run has to `gorgo.lab.sim.scenarios`, and their effect on one
replica to `gorgo.lab.sim.remote_replica`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol, TypeVar, runtime_checkable

from gorgo.errors import ScenarioError, UnknownReplica
from gorgo.lab.sim.engine.engines import Engine
from gorgo.lab.sim.engine.request import EngineRequest
from gorgo.lab.sim.event_queue import EventQueue
from gorgo.lab.sim.fleet import SimFleet
from gorgo.lab.sim.kv_events import CacheReporting, PathFaults
from gorgo.lab.sim.remote_replica import RemoteReplica
from gorgo.lab.sim.routers import RouterShell


class FaultInjector:
    """One run's.

    Parameters
    ----------
    kernel, fleet, engines, caches, shells:
        The simulation's; `engines` by name. Every method raises `UnknownReplica` for a name that is not among them,
        and does nothing for a region without a replica.
    """

    def __init__(
        self,
        kernel: EventQueue,
        fleet: SimFleet,
        engines: Mapping[str, RemoteReplica],
        caches: CacheReporting,
        shells: Sequence[RouterShell] = (),
    ) -> None:
        self.kernel = kernel
        self.fleet = fleet
        self.engines = engines
        self._caches = caches
        self._shells = shells

    def set_slowdown(self, replica: str, factor: float) -> None:
        """The replica's steps from now on take so many times as long."""
        self._site(replica).set_slowdown(factor)

    def set_rtt(self, region: str, rtt_s: float) -> None:
        """The mean round trip to a region is another."""
        for site in self._sites(region):
            site.set_rtt(rtt_s)

    def kill(self, replica: str) -> None:
        """Fail open requests and reject new ones; the state of the engine is lost."""
        self._site(replica).kill()

    def revive(self, replica: str) -> None:
        """It answers again, with an empty cache."""
        self._site(replica).revive()

    def hang(self, replica: str) -> None:
        """Let it stand still with open connections, until it is killed."""
        self._site(replica).hang()

    def set_draining(self, replica: str, draining: bool) -> None:
        """Drain it, and have its streams go on elsewhere; or undo that."""
        self._site(replica)
        for shell in self._shells:
            shell.set_draining(replica, draining)

    def set_reachable(self, replica: str, reachable: bool) -> None:
        """Cut off from the proxy, as if killed, but it keeps its cache."""
        self._site(replica).set_reachable(reachable)

    def set_metrics(self, replica: str, reported: bool) -> None:
        """Whether scrapes succeed."""
        for port in self._site(replica).ports:
            port.background.reports_metrics = reported

    def set_probes(self, replica: str, reported: bool) -> None:
        """Whether probes are answered."""
        for port in self._site(replica).ports:
            port.background.reports_probes = reported

    def set_failing(self, replica: str, status: int | None) -> None:
        """Answer each request with an error status at once."""
        self._site(replica).set_failing(status)

    def set_path_delay(self, region: str, share: float, low_s: float, high_s: float) -> None:
        """That share of requests to the region takes so much longer to get there, uniform between the two."""
        for site in self._sites(region):
            site.set_path_delay(share, low_s, high_s)

    def set_report_faults(self, replica: str, faults: PathFaults) -> None:
        """Reports of the replica's cache fare so from now on; requests are not affected."""
        self._site(replica)
        feed = self._caches.feeds.get(replica)
        if feed is not None:
            feed.path.faults = faults

    def restart_router(self) -> None:
        """Empty the Router's index; engines and requests go on."""
        self._caches.restart_router()

    def _site(self, replica: str) -> RemoteReplica:
        try:
            return self.engines[replica]
        except KeyError:
            raise UnknownReplica(f"no replica named {replica!r}; the fleet has: {', '.join(self.engines)}") from None

    def _sites(self, region: str) -> list[RemoteReplica]:
        return [site for site in self.engines.values() if site.replica.region == region]


# The interfaces of a running simulation for observers and faults: engines, clock, and actions.


class EngineView(Protocol):
    """One engine as an onlooker sees it, at any time of the run."""

    @property
    def model(self) -> Engine[Any]:
        """The engine itself; another one after a revival."""

    @property
    def in_transit(self) -> Sequence[tuple[float, EngineRequest]]:
        """Requests sent and not there yet, with the times at which they will arrive, s."""

    @property
    def rtt_s(self) -> float:
        """Present mean round trip from the proxy."""

    @property
    def alive(self) -> bool:
        """False while it is unreachable."""


@runtime_checkable
class EngineObserver(Protocol):
    """A policy that sees the engines."""

    def observe(self, engines: Mapping[str, EngineView]) -> None:
        """Before the run; they may be looked at whenever it decides."""


# Theory of operation. `start` runs before the first event and only puts handlers into the kernel's heap. A fault sets
# a state and sets it back when it ends; two of one kind that overlap on one replica are not added up, the later
# setting stands. Every fault that repeats has an end, so that the heap runs empty.


T = TypeVar("T")


class Fault(Protocol):
    """Something that goes wrong."""

    def start(self, world: FaultInjector) -> None:
        """Put its events into the world's heap; raises `UnknownReplica` or `ScenarioError` without a target."""


@dataclass(frozen=True, slots=True)
class Slow:
    """Every step of a replica takes `factor` times as long."""

    replica: str
    factor: float
    start_s: float
    end_s: float = inf

    def start(self, world: FaultInjector) -> None:
        _replica(world, self.replica)
        _set_between(world, world.set_slowdown, self.replica, (self.factor, 1.0), self.start_s, self.end_s)


@dataclass(frozen=True, slots=True)
class RttShift:
    """The way to a region is another one for a while."""

    region: str
    rtt_s: float
    start_s: float
    end_s: float = inf

    def start(self, world: FaultInjector) -> None:
        usual_s = region_rtt_s(world.fleet, self.region)
        _set_between(world, world.set_rtt, self.region, (self.rtt_s, usual_s), self.start_s, self.end_s)


@dataclass(frozen=True, slots=True)
class Kill:
    """A replica goes, with all that runs there, and comes back cold."""

    replica: str
    start_s: float
    end_s: float = inf

    def start(self, world: FaultInjector) -> None:
        _replica(world, self.replica)
        _from_to(world, self.start_s, lambda: world.kill(self.replica), self.end_s, lambda: world.revive(self.replica))


@dataclass(frozen=True, slots=True)
class Hang:
    """A replica stands still with open connections, and comes back cold."""

    replica: str
    start_s: float
    end_s: float = inf

    def start(self, world: FaultInjector) -> None:
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

    def start(self, world: FaultInjector) -> None:
        _replica(world, self.replica)
        _set_between(world, world.set_draining, self.replica, (True, False), self.start_s, self.end_s)


@dataclass(frozen=True, slots=True)
class FailFast:
    """A replica answers each request with an error status at once, and its probes as before."""

    replica: str
    status: int
    start_s: float
    end_s: float = inf

    def start(self, world: FaultInjector) -> None:
        _replica(world, self.replica)
        _set_between(world, world.set_failing, self.replica, (self.status, None), self.start_s, self.end_s)


@dataclass(frozen=True, slots=True)
class StaleMetrics:
    """A replica, or all, report no load."""

    replica: str | None
    start_s: float
    end_s: float = inf

    def start(self, world: FaultInjector) -> None:
        for name in one_or_all(world, self.replica):
            _set_between(world, world.set_metrics, name, (False, True), self.start_s, self.end_s)


@dataclass(frozen=True, slots=True)
class StaleProbes:
    """Pings of a replica, or of all, are not answered; requests are."""

    replica: str | None
    start_s: float
    end_s: float = inf

    def start(self, world: FaultInjector) -> None:
        for name in one_or_all(world, self.replica):
            _set_between(world, world.set_probes, name, (False, True), self.start_s, self.end_s)


@dataclass(frozen=True, slots=True)
class Partition:
    """A region is unreachable; its replicas keep their caches."""

    region: str
    start_s: float
    end_s: float = inf

    def start(self, world: FaultInjector) -> None:
        for replica in replicas_in(world.fleet, self.region):
            _set_between(world, world.set_reachable, replica, (False, True), self.start_s, self.end_s)


@dataclass(frozen=True, slots=True)
class PeriodicStall:
    """A replica all but stops for a while, again and again, until `end_s`; first a whole period after `start_s`."""

    replica: str
    end_s: float
    factor: float = 40.0
    lasts_s: float = 8.0
    every_s: float = 100.0
    start_s: float = 0.0

    def start(self, world: FaultInjector) -> None:
        _replica(world, self.replica)
        if not 0 < self.lasts_s < self.every_s or self.end_s == inf:
            raise ScenarioError(f"{self!r}: expected 0 < lasts_s < every_s and an end")
        self._next(world, self.start_s + self.every_s)

    def _next(self, world: FaultInjector, at_s: float) -> None:
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

    def start(self, world: FaultInjector) -> None:
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


def one_or_all(world: FaultInjector, replica: str | None) -> Sequence[str]:
    """Return the replica, or all of the fleet for `None`; raises `UnknownReplica`."""
    return [each.name for each in world.fleet.replicas] if replica is None else [_replica(world, replica)]


# -- helpers


def _from_to(
    world: FaultInjector, start_s: float, begin: Callable[[], None], end_s: float, end: Callable[[], None]
) -> None:
    world.kernel.at(start_s, begin)
    if end_s < inf:
        world.kernel.at(end_s, end)


def _set_between(
    world: FaultInjector,
    set_value: Callable[[str, T], None],
    name: str,
    values: tuple[T, T],
    start_s: float,
    end_s: float,
) -> None:
    """Set a value of a replica or region at the start, and its usual one at the end."""
    value, usual = values
    _from_to(world, start_s, lambda: set_value(name, value), end_s, lambda: set_value(name, usual))


def _replica(world: FaultInjector, name: str) -> str:
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

    def start(self, world: FaultInjector) -> None:
        for name in one_or_all(world, self.replica):
            _set_between(world, world.set_report_faults, name, (self.faults, _NONE), self.start_s, self.end_s)


@dataclass(frozen=True, slots=True)
class RouterRestart:
    """The router starts with an empty index; the engines are warm."""

    at_s: float

    def start(self, world: FaultInjector) -> None:
        world.kernel.at(self.at_s, world.restart_router)
