"""The interfaces of a running simulation for observers and faults: engines, clock, and actions.

Owns the seam between a run and its observers (`oracle`, policies that read engines) and faults. `injector` and
`sim.remote_replica` implement it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from gorgo.sim.engine.engines import Engine
from gorgo.sim.engine.request import EngineRequest
from gorgo.sim.fleet import SimFleet
from gorgo.sim.kv_events.path import PathFaults


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
