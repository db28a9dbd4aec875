"""The `FaultApi` of a simulated fleet, and the interfaces between a run, its faults and its observers.

Owns the lookup of replicas by name or region, and what observers (the oracle, policies that read engines) and faults
may see and do. Leaves the times of faults to `gorgo.lab.sim.faults.scenarios`, and their effect on one replica to
`gorgo.lab.sim.remote_replica`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from gorgo.errors import UnknownReplica
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


class Schedule(Protocol):
    """The clock of a simulation."""

    @property
    def now(self) -> float: ...

    def at(self, time_s: float, handler: Callable[[], None], /) -> object:
        """Call `handler` at that time."""


class FaultApi(Protocol):
    """Actions of a fault on a simulation."""

    @property
    def kernel(self) -> Schedule: ...

    @property
    def fleet(self) -> SimFleet: ...

    @property
    def engines(self) -> Mapping[str, EngineView]: ...

    def set_slowdown(self, replica: str, factor: float) -> None:
        """Its steps from now on take so many times as long."""

    def set_rtt(self, region: str, rtt_s: float) -> None:
        """The mean round trip from the proxy to that region is another."""

    def kill(self, replica: str) -> None:
        """Kill the replica with all its state; requests to it fail."""

    def revive(self, replica: str) -> None:
        """Back, with an empty cache."""

    def hang(self, replica: str) -> None:
        """It stands still with open connections, until it is killed."""

    def set_draining(self, replica: str, draining: bool) -> None:
        """It gets no new requests, and its streams go on elsewhere; or that is undone."""

    def set_metrics(self, replica: str, reported: bool) -> None:
        """Whether its load figures can be scraped."""

    def set_probes(self, replica: str, reported: bool) -> None:
        """Whether it answers pings."""

    def set_failing(self, replica: str, status: int | None) -> None:
        """It answers each request with that status at once, and probes as before; `None` ends it."""

    def set_path_delay(self, region: str, share: float, low_s: float, high_s: float) -> None:
        """That share of requests to the region takes so much longer to arrive; a share of 0 ends it."""


@runtime_checkable
class Partitionable(Protocol):
    """A simulation whose replicas can be unreachable without losing their state."""

    def set_reachable(self, replica: str, reachable: bool) -> None: ...


@runtime_checkable
class ReportingCaches(Protocol):
    """A simulation whose engines report their caches, and whose router can lose what it knows of them."""

    def set_report_faults(self, replica: str, faults: PathFaults) -> None: ...

    def restart_router(self) -> None: ...
