"""One router's way to one replica: its link, its connections, and what it asks beside requests.

Owns the port, and the probes, scrapes and keep-warm pings of a replica (`Monitor`). The replica is shared:
`gorgo.lab.sim.remote_replica` has its engine, its faults and the times of requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from gorgo.config.values import PROBE_TIMEOUT_S, WARM_CONNECTIONS
from gorgo.core.messages.request import COMPLETED, EngineSample, OpenConnection, Outcome
from gorgo.lab.sim.engine.driver import SimAttempt
from gorgo.lab.sim.engine.engines import Engine
from gorgo.lab.sim.engine.request import EngineRequest
from gorgo.lab.sim.event_queue import EventQueue
from gorgo.lab.sim.network import ConnectionPool, Link, PooledSimConnection, RandomTable, TripDelays

# Probes, scrapes and keep-warm pings use the connections of requests, and a scrape has the values of the time at which
# its first request reaches the engine. The simulation decides when to poll.


#: First row of the random table for probes and scrapes.
_BACKGROUND_KEY = 1 << 40


class MonitorSink(Protocol):
    """Receiver of the answers; `None` is no answer."""

    def on_probe(self, replica: str, rtt_s: float | None) -> None: ...

    def on_sample(self, replica: str, sample: EngineSample | None) -> None: ...


class Reachable(Protocol):
    """The other end of a path, as it is at the time."""

    @property
    def link(self) -> Link: ...

    @property
    def alive(self) -> bool: ...


class MonitoredReplica(Reachable, Protocol):
    """The replica, as it is at the time."""

    @property
    def model(self) -> Engine[Any]: ...

    @property
    def models(self) -> Sequence[Engine[Any]]: ...


class Monitor:
    """Probes and scrapes of one replica.

    Parameters
    ----------
    kernel, listener:
        The event queue, and the receiver of the answers.
    replica, name:
        The replica.
    pool:
        Its connections.
    trips:
        Delays of these trips, apart from those of requests.
    """

    def __init__(
        self,
        kernel: EventQueue,
        listener: MonitorSink,
        replica: MonitoredReplica,
        pool: ConnectionPool,
        *,
        name: str,
        trips: TripDelays,
    ) -> None:
        self._kernel = kernel
        self._listener = listener
        self._replica = replica
        self._pool = pool
        self._name = name
        self._trips = trips
        #: Result of the last probe: connections of a dead replica are not kept warm.
        self._answers = True
        self.reports_metrics = self.reports_probes = True

    def probe_first(self) -> None:
        """Run the probes before the start: answered at once, and they leave warm connections."""
        now = self._kernel.now
        taken = [self._pool.acquire(0, now=now)[0] for _ in range(WARM_CONNECTIONS)]
        self._listener.on_probe(self._name, self._trips.round_trip_s(self._replica.link))
        self._listener.on_sample(self._name, self._sample())
        for pooled in taken:
            self._pool.release(pooled, now=now)

    def warm(self) -> None:
        """Pings that keep connections open, as long as the replica answers."""
        if not (self._answers and self._replica.alive):
            return
        for _ in range(WARM_CONNECTIONS):
            pooled, back_s = self._ping()
            self._kernel.at(back_s, partial(self._give_back, pooled))

    def probe(self) -> None:
        """Send two pings and report the RTT of the second: the first may include a connection set-up."""
        if not self._can_answer(self.reports_probes):
            lost_s = PROBE_TIMEOUT_S if self._replica.alive else self._trips.round_trip_s(self._replica.link)
            self._kernel.at(self._kernel.now + lost_s, partial(self._probed, None, None))
            return
        pooled, back_s = self._ping()
        self._kernel.at(back_s, partial(self._ping_again, pooled))

    def scrape(self) -> None:
        """The engine's metrics, then its loads: figures of the time at which the first question arrives."""
        if not self._can_answer(self.reports_metrics):
            self._listener.on_sample(self._name, None)
            return
        pooled, waits = self._pool.acquire(0, now=self._kernel.now)
        self._kernel.at(self._kernel.now + self._trips.out_s(self._replica.link, waits), partial(self._read, pooled))

    # -- helpers

    def _can_answer(self, reported: bool) -> bool:
        return reported and self._replica.alive

    def _ping(self) -> tuple[PooledSimConnection, float]:
        """A small question on the connection that is next, and when its answer is there."""
        now = self._kernel.now
        pooled, waits = self._pool.acquire(0, now=now)
        return pooled, now + self._trips.out_s(self._replica.link, waits) + self._trips.one_way_s(self._replica.link)

    def _ping_again(self, pooled: PooledSimConnection) -> None:
        self._give_back(pooled)
        if not self._replica.alive:
            self._probed(None, None)
            return
        sent_s = self._kernel.now
        pooled, back_s = self._ping()
        self._kernel.at(back_s, partial(self._probed, pooled, back_s - sent_s))

    def _probed(self, pooled: PooledSimConnection | None, rtt_s: float | None) -> None:
        if pooled is not None:
            if pooled.lost:
                rtt_s = None
            self._give_back(pooled)
        self._answers = rtt_s is not None
        self._listener.on_probe(self._name, rtt_s)

    def _read(self, pooled: PooledSimConnection) -> None:
        if pooled.lost:
            self._listener.on_sample(self._name, None)
            return
        trips, link = self._trips, self._replica.link
        arrival_s = self._kernel.now + trips.one_way_s(link) + trips.round_trip_s(link)
        self._kernel.at(arrival_s, partial(self._scraped, pooled, self._sample()))

    def _scraped(self, pooled: PooledSimConnection, sample: EngineSample) -> None:
        self._listener.on_sample(self._name, None if pooled.lost else sample)
        self._give_back(pooled)

    def _sample(self) -> EngineSample:
        models = self._replica.models
        profile = models[0].profile
        sample = EngineSample(
            running_requests=float(sum(model.running for model in models)),
            queued_requests=float(sum(model.queued for model in models)),
            used_tokens=float(sum(model.used_tokens for model in models)),
            kv_capacity_tokens=float(profile.kv_tokens * len(models)),
            prompt_tokens_total=float(sum(model.totals.prompt_tokens for model in models)),
        )
        if profile.scheduler == "vllm":
            return sample  # It reports neither its batch limit nor its prefill.
        return replace(
            sample,
            max_running_requests=float(profile.max_running_requests * len(models)),
            prefill_tokens_total=float(sum(model.totals.prefill_tokens for model in models)),
            prefill_busy_s_total=sum(model.totals.prefill_busy_s for model in models),
        )

    def _give_back(self, pooled: PooledSimConnection) -> None:
        self._pool.release(pooled, now=self._kernel.now)


def background_trips(draws: RandomTable, number: int) -> TripDelays:
    """For replica `number` of the fleet."""
    return TripDelays(draws, _BACKGROUND_KEY + number)


class Callbacks(MonitorSink, Protocol):
    """Receiver of the events of attempts."""

    def on_connection(self, replica: str, connection: OpenConnection | None) -> None: ...

    def on_first_token(self, sending: SimAttempt) -> None: ...

    def on_stalled(self, sending: SimAttempt) -> bool: ...

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
    def models(self) -> Sequence[Engine[Any]]:
        """The engines of all ranks."""
        return self._site.models

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
