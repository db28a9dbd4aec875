"""One run in virtual time: the proxy's own Router and policy, simulated replicas, one workload of requests.

Owns how a run is made of its parts, the feed, events beside those of requests, and the interfaces of what a run takes
beside its fleet and its requests (`Startable`, `Controller`). `routers` has the shell around a Router. Engines and
network are in `remote_replica`, faults act through `faults`, `open_requests` records each request and
`event_queue` orders events.

Theory of operation. A run begins with a probe of every replica; requests follow. Probes, scrapes,
pings that keep connections warm, faults and controllers are events beside those of requests. The run ends when the
feed is exhausted and no request is open, whatever else is still in the heap. In a closed loop a turn of a session comes
a think time after the end of the answer before it. A cheap bound on memory follows: a record
per request of the feed, and in the heap what is in flight.

What the proxy does and this does not: the time-out between two chunks (a stream of a slow simulated engine goes on;
that of one that hangs is continued elsewhere), jitter of the intervals, and CPU time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from sys import maxsize
from typing import Protocol

import numpy as np

from gorgo.config.values import STALE_INTERVALS, WARM_INTERVAL_S
from gorgo.core.limits import RouterLimits
from gorgo.core.policy.interface import USUAL_SCRAPE_S, Policy
from gorgo.core.policy.interface import scrape_interval_s as needed_scrape_s
from gorgo.core.policy.weights import Weights
from gorgo.core.router import Router
from gorgo.errors import ConfigError
from gorgo.lab.sim.engine.itl import ItlHistogram
from gorgo.lab.sim.event_queue import EventQueue
from gorgo.lab.sim.faults import EngineObserver, FaultInjector
from gorgo.lab.sim.fleet import SimFleet
from gorgo.lab.sim.kv_events import CacheReporting, CacheReports
from gorgo.lab.sim.network import Link, RandomTable, random_table
from gorgo.lab.sim.open_requests import OpenRequests
from gorgo.lab.sim.pinned import TraceObserver
from gorgo.lab.sim.port import Monitor, background_trips
from gorgo.lab.sim.records import SimResult
from gorgo.lab.sim.remote_replica import RemoteReplica
from gorgo.lab.sim.routers import KEYS_PER_REQUEST, ONE_ROUTER, PeerStore, RouterGroup, RouterShell, RunParts
from gorgo.lab.sim.topology import Clients
from gorgo.lab.sim.workload import BLOCK_TOKENS, SimRequest


class Startable(Protocol):
    """A fault, which puts itself into the event queue (`faults`)."""

    def start(self, topology: FaultInjector) -> None: ...


class Controller(Protocol):
    """Something that acts on the Router now and then: a tuner, an operator."""

    @property
    def next_s(self) -> float | None:
        """When it acts next; None: never again."""

    def act(self, router: Router, now: float) -> None: ...


class Simulation:
    """One run; made for one feed.

    Parameters
    ----------
    fleet:
        The replicas.
    policy:
        The policy. One with a method for engines, or for the trace and the fleet, is given them before the run.
    weights:
        Values to start with; the policy's defaults if None.
    seed:
        Of the network's jitter, which is the same for every policy, and of the Router's chance.
    faults:
        Faults; each schedules itself.
    limits:
        The Router's bounds. Default: those of the proxy, with blocks of `block_tokens`.
    probe_interval_s, scrape_interval_s:
        As in regions.yaml: scrapes are by default as frequent as the policy needs.
    block_tokens:
        Tokens of one hash of a request's `blocks`, and of one item in the engines' caches.
    shadow:
        Scores each decision of `policy` and changes none, as in the Router.
    controllers:
        Act at their own times.
    slo_ttft_s:
        Deadline of every request, s.
    client_concurrency:
        Most requests that the client has open; later ones wait at the client, unmeasured. None: an open loop.
    ahead:
        As in `EngineDriver`.
    cache_reports:
        What engines report of their caches.

    Example
    -------
    >>> from gorgo.core.fleet.replica import ReplicaSpec
    >>> from gorgo.policies.registry import make_policy
    >>> from gorgo.lab.sim.fleet import SimReplica
    >>> from gorgo.lab.sim.network import Link
    >>> from gorgo.lab.sim.engine.profiles import find_profile
    >>> profile = find_profile("2xL40S-Qwen3.5-35B-A3B-FP8-estimate")
    >>> replica = SimReplica(ReplicaSpec("eu-0", "eu-frankfurt"), profile, Link(rtt_s=0.095, jitter=0.0))
    >>> request = SimRequest(index=0, arrival_s=0.0, prompt_tokens=1150, output_tokens=2, blocks=b"", prefix_hash=0)
    >>> result = Simulation(SimFleet([replica]), make_policy("gorgo-ms"), seed=0).run([request])
    >>> result.records[0].replica, round(result.records[0].ttft_ms)  # 95 ms, 12 ms, 100 ms, and attention
    ('eu-0', 208)
    """

    def __init__(
        self,
        fleet: SimFleet,
        policy: Policy,
        *,
        seed: int,
        weights: Weights | None = None,
        faults: Sequence[Startable] = (),
        limits: RouterLimits | None = None,
        probe_interval_s: float = 30.0,
        scrape_interval_s: float | None = None,
        block_tokens: int = BLOCK_TOKENS,
        shadow: Policy | None = None,
        controllers: Sequence[Controller] = (),
        slo_ttft_s: float | None = None,
        client_concurrency: int | None = None,
        ahead: bool = True,
        cache_reports: CacheReports = "usage",
        routers: RouterGroup = ONE_ROUTER,
    ) -> None:
        if routers.shells > 1 and cache_reports not in ("none", "usage"):
            raise ConfigError(f"{routers.shells} routers and cache reports {cache_reports!r}; expected none or usage")
        stale_after_s = STALE_INTERVALS * max(probe_interval_s, scrape_interval_s or USUAL_SCRAPE_S)
        self.kernel = EventQueue()
        self._fleet, self._block_tokens = fleet, block_tokens
        self._specs = [replica.spec for replica in fleet.replicas]
        self._limits = limits or RouterLimits(block_tokens=float(block_tokens), stale_after_s=stale_after_s)
        self._seed, self._weights, self._group = seed, weights, routers
        #: The store that carries the routers' reports; `None` if they share nothing.
        self.store = PeerStore(self.kernel, routers, seed=seed) if routers.reports else None
        #: A policy as it was given: routers beyond the first have copies, as has one that is replaced.
        self._policy, self._fresh, self._made = policy, deepcopy(policy), 0
        self.gaps = ItlHistogram()
        draws = random_table(seed)
        self._served = OpenRequests(
            block_tokens=float(block_tokens), slo_ttft_s=slo_ttft_s, kv_hashes=lambda blocks: self.caches.hashes(blocks)
        )
        run = RunParts(
            self.kernel, draws, self._served, self._stop_if_done, lambda outcome: self.caches.reported(outcome)
        )
        publish = None if self.store is None else self.store.publish
        #: One per router.
        self.shells = [RouterShell(self._new_router(shadow), run, publish=publish) for _ in range(routers.shells)]
        first = self.shells[0]
        self.engines: Mapping[str, RemoteReplica] = {
            replica.name: RemoteReplica(
                self.kernel,
                first,
                replica,
                number=number,
                draws=draws,
                block_tokens=block_tokens,
                gaps=self.gaps,
                has_samples=self.router.samples.capacity > 0,
                ahead=ahead,
            )
            for number, replica in enumerate(fleet.replicas)
        }
        sites = list(self.engines.values())
        for number, shell in enumerate(self.shells):
            _connect(shell, sites, routers.links(fleet, number), draws, number)
        self.caches = CacheReporting(
            cache_reports, self.kernel, self.router, first.carry_out, sites, draws=draws, item_tokens=block_tokens
        )
        #: What can go wrong.
        self.injector = FaultInjector(self.kernel, fleet, self.engines, self.caches, self.shells)
        self._faults = faults
        self._intervals = (probe_interval_s, needed_scrape_s(scrape_interval_s, policy, shadow))
        self._controllers = controllers
        self._feed: Sequence[SimRequest] = ()
        #: Of the feed, those that come at a time of their own, and those that follow another one, by its index.
        self._openers: Sequence[SimRequest] = ()
        self._turns: dict[int, SimRequest] = {}
        self._next = 0
        topology = routers.topology
        #: Clients that are not beside their router.
        self._clients = None if topology is None or not topology.clients else Clients(topology, draws, seed=seed)
        self._client_concurrency, self._client_waits = client_concurrency or maxsize, False

    @property
    def router(self) -> Router:
        """The first Router."""
        return self.shells[0].router

    def run(self, feed: Sequence[SimRequest]) -> SimResult:
        """Serve every request of `feed`, which is in the order of arrival."""
        assert not self._served.records, "a simulation runs once"
        self._turns = {request.after: request for request in feed if request.after is not None}
        if (self._turns or self._clients) and self._client_concurrency != maxsize:
            raise ConfigError(
                "a client with a bound on its open requests, far from its router or in a closed loop; expected one of "
                "the two"
            )
        self._feed = feed
        self._prepare()
        self._openers = [request for request in feed if request.after is None] if self._turns else feed
        if feed:
            self.kernel.at(self._openers[0].arrival_s, self._receive)
            self.kernel.run()
        assert not self._served, "every request has ended"
        preemptions = sum(site.preemptions for site in self.engines.values())
        if self._clients is not None:  # they came to their routers in another order
            self._served.records.sort(key=lambda record: (record.scheduled_s, int(record.id)))
        return SimResult(self._served.records, self.gaps, self.kernel.now, self.kernel.handled, preemptions)

    def replace_router(self, number: int) -> None:
        """Kill a router, with its requests, and put a new one in its place, which knows what the store has."""
        shell = self.shells[number]
        shell.replace_router(self._new_router())
        self._show_engines(number)
        if self.store is not None:
            self.store.replay(shell)
        shell.arm()

    # -- the run

    def _new_router(self, shadow: Policy | None = None) -> Router:
        """Return the first Router with the given policy, and others with a copy as it was."""
        number, self._made = self._made, self._made + 1
        router = Router(
            self._specs,
            deepcopy(self._fresh) if number else self._policy,
            rng=np.random.default_rng([self._seed, number] if number else self._seed),
            boot_id=f"simulated-{self._seed}-{number}" if number else f"simulated-{self._seed}",
            weights=self._weights,
            limits=self._limits,
            shadow=None if number else shadow,
        )
        if self.store is not None:
            router.peers.join(router.boot_id, key_id="one key")
        return router

    def _prepare(self) -> None:
        for number in range(len(self.shells)):
            self._show_engines(number)
        for site in self.engines.values():
            site.probe_first()
        probe_s, scrape_s = self._intervals
        self.kernel.every(probe_s, partial(self._submit, Monitor.probe))
        self.kernel.every(scrape_s, partial(self._submit, Monitor.scrape))
        self.kernel.every(WARM_INTERVAL_S, partial(self._submit, Monitor.warm))
        if self.store is not None:
            self.store.start(self.shells)
        for controller in self._controllers:
            self._enqueue(controller)
        for fault in self._faults:
            fault.start(self.injector)

    def _show_engines(self, number: int) -> None:
        shell, topology = self.shells[number], self._group.topology
        policy = shell.router.settings.policy
        if isinstance(policy, EngineObserver):
            policy.observe({name: port for name, (_, port) in shell.ports.items()})
        if isinstance(policy, TraceObserver):
            fleet = self._fleet if topology is None else topology.fleet_of(self._fleet, number)
            policy.prepare(self._feed, fleet, block_tokens=self._block_tokens)

    def _submit(self, action: Callable[[Monitor], None]) -> None:
        for site in self.engines.values():
            for port in site.ports:
                action(port.background)

    def _enqueue(self, controller: Controller) -> None:
        if controller.next_s is not None:
            self.kernel.at(max(controller.next_s, self.kernel.now), partial(self._control, controller))

    def _control(self, controller: Controller) -> None:
        controller.act(self.shells[0].informed(), self.kernel.now)
        self.shells[0].arm()
        self._enqueue(controller)

    def _receive(self) -> None:
        """The next request of the feed is here, unless its client waits for another one to end."""
        self._client_waits = len(self._served) >= self._client_concurrency
        if self._client_waits:
            return
        request = self._openers[self._next]
        self._next += 1
        if self._next < len(self._openers):
            self.kernel.at(max(self.kernel.now, self._openers[self._next].arrival_s), self._receive)
        self._submit_request(request)

    def _submit_request(self, request: SimRequest) -> None:
        if self._clients is None:
            self.shells[self._group.router_of(request, seed=self._seed)].submit(request)
            return
        key = request.index * KEYS_PER_REQUEST  # attempts count from 1
        number, trip = self._clients.start_trip(request, now=self.kernel.now, key=key)
        self.kernel.at(trip.received_s, partial(self.shells[number].submit, request, trip))

    def _begin_turns(self) -> None:
        """Schedule what follows the requests that have ended: an answer that failed is followed too."""
        ended = self._served.ended
        while ended:
            index, ended_s = ended.pop()
            turn = self._turns.pop(index, None)
            if turn is not None:
                self.kernel.at(ended_s + turn.think_s, partial(self._submit_request, turn))

    def _stop_if_done(self) -> None:
        self._begin_turns()
        if not self._served and len(self._served.records) == len(self._feed):
            self.kernel.stop()
        elif self._client_waits:
            self._client_waits = False
            self.kernel.at(self.kernel.now, self._receive)


def _connect(
    shell: RouterShell, sites: Sequence[RemoteReplica], links: Sequence[Link], draws: RandomTable, number: int
) -> None:
    """Give a shell its ports; the first has those that replicas are made with."""
    for index, (site, link) in enumerate(zip(sites, links, strict=True)):
        if number:
            port = site.add_port(shell, link, background_trips(draws, number * len(sites) + index))
        else:
            port = site.ports[0]
            port.link = link
        shell.ports[site.name] = site, port
