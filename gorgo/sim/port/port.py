"""One router's way to one replica: its link, its connections, and what it asks beside requests.

Owns them. The replica is shared: `sim.remote_replica` has its engine, its faults and the times of requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from gorgo.core.messages.request import COMPLETED, OpenConnection, Outcome
from gorgo.sim.engine.driver import SimAttempt
from gorgo.sim.engine.engines import Engine
from gorgo.sim.engine.request import EngineRequest
from gorgo.sim.event_queue import EventQueue
from gorgo.sim.network.links import Link, TripDelays
from gorgo.sim.network.pool import ConnectionPool
from gorgo.sim.port.monitor import Monitor, MonitoredReplica, MonitorSink


class Callbacks(MonitorSink, Protocol):
    """Receiver of the events of attempts."""

    def on_connection(self, replica: str, connection: OpenConnection | None) -> None: ...

    def on_first_token(self, sending: SimAttempt) -> None: ...

    def on_end(self, sending: SimAttempt, outcome: Outcome) -> None: ...


class SharedReplica(MonitoredReplica, Protocol):
    """The replica behind ports."""

    name: str

    @property
    def in_transit(self) -> Sequence[tuple[float, EngineRequest]]: ...


class ReplicaPort(MonitoredReplica):
    """The way of one router; to an observer that router's view of the engine.

    Parameters
    ----------
    kernel, site, shell:
        The event queue, the replica, and the router's receiver of events.
    link:
        From the router to the replica.
    trips:
        Delays of probes and scrapes.
    """

    def __init__(
        self, kernel: EventQueue, site: SharedReplica, shell: Callbacks, link: Link, trips: TripDelays
    ) -> None:
        self.shell = shell
        self._link = link
        self._site = site
        self.pool = ConnectionPool(self, partial(shell.on_connection, site.name))
        #: What the router asks beside requests.
        self.background = Monitor(kernel, shell, self, self.pool, name=site.name, trips=trips)
        #: Attempts that have not ended.
        self.open_attempts = 0

    @property
    def link(self) -> Link:
        return self._link

    @link.setter
    def link(self, link: Link) -> None:
        self._link = link

    @property
    def model(self) -> Engine[Any]:
        """The engine as it is now; another one after a death."""
        return self._site.model

    @property
    def alive(self) -> bool:
        return self._site.alive

    @property
    def in_transit(self) -> Sequence[tuple[float, EngineRequest]]:
        """Requests of all routers that are sent and not there yet, with the times at which they will arrive."""
        return self._site.in_transit

    @property
    def rtt_s(self) -> float:
        """Present mean round trip."""
        return self._link.rtt_s

    def probe_first(self) -> None:
        """Run the probes before the start."""
        self.shell.on_connection(self._site.name, None)
        self.background.probe_first()


def completed_outcome(sending: SimAttempt, *, itl_s_p95: float | None) -> Outcome:
    """Return the outcome of a whole answer, with the engine's usage."""
    return Outcome(
        COMPLETED,
        status=200,
        prompt_tokens=sending.prompt_tokens,
        cached_tokens=sending.cached_tokens,
        output_tokens=sending.output_tokens,
        itl_s_p95=itl_s_p95,
    )
