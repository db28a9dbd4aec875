"""One run in virtual time: the proxy's own Router and policy, simulated replicas, one workload of requests.

Owns the shell around the Router: it carries out the Router's actions and reports events to it, as the proxy does.
Engines and network are in `network.remote_replica`, faults act through `faults.injector`, `open_requests` records each
request and `event_queue` orders events.

Theory of operation. A run begins with a probe of every replica; requests follow. Probes, scrapes,
pings that keep connections warm, faults and controllers are events beside those of requests. The run ends when the
feed is exhausted and no request is open, whatever else is still in the heap. A cheap bound on memory follows: a record
per request of the feed, and in the heap what is in flight.

What the proxy does and this does not: the time-out between two chunks (60 s; a stalled stream of a simulated engine
goes on), jitter of the intervals, and CPU time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from sys import maxsize

import numpy as np

from gorgo.config.constants import STALE_INTERVALS, WARM_INTERVAL_S
from gorgo.core.limits import RouterLimits
from gorgo.core.messages.actions import Action, Cancel, Dispatch, Forward, Hedge, Reject
from gorgo.core.messages.request import EngineSample, OpenConnection, Outcome
from gorgo.core.policy.interface import Policy
from gorgo.core.policy.weights import Weights
from gorgo.core.router import Router
from gorgo.sim.engine.driver import SimAttempt
from gorgo.sim.engine.itl import ItlHistogram
from gorgo.sim.event_queue import EventQueue
from gorgo.sim.extensions import Controller, Startable
from gorgo.sim.faults.api import EngineObserver
from gorgo.sim.faults.injector import FaultInjector
from gorgo.sim.fleet import SimFleet
from gorgo.sim.kv_events.reports import CacheReporting, CacheReports
from gorgo.sim.monitor import Monitor
from gorgo.sim.network.links import TripDelays, random_table
from gorgo.sim.open_requests import OpenRequests
from gorgo.sim.records import SimResult
from gorgo.sim.remote_replica import RemoteReplica
from gorgo.sim.timeouts import FirstTokenTimeouts, RouterTimer
from gorgo.sim.workload import BLOCK_TOKENS, SimRequest

#: Keys of trips per request: more than the attempts that any limit allows in practice.
KEYS_PER_REQUEST = 8


class Simulation:
    """One run; made for one feed.

    Parameters
    ----------
    fleet:
        The replicas.
    policy:
        The policy. One with a method for engines is given them before the run.
    weights:
        Values to start with; the policy's defaults if None.
    seed:
        Of the network's jitter, which is the same for every policy, and of the Router's chance.
    faults:
        Faults; each schedules itself.
    limits:
        The Router's bounds. Default: those of the proxy, with blocks of `block_tokens`.
    probe_interval_s, scrape_interval_s:
        As in regions.yaml.
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
    >>> from gorgo.core.fleet.spec import ReplicaSpec
    >>> from gorgo.policies.registry import make_policy
    >>> from gorgo.sim.fleet import SimReplica
    >>> from gorgo.sim.network.links import Link
    >>> from gorgo.sim.engine.profiles import find_profile
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
        scrape_interval_s: float = 30.0,
        block_tokens: int = BLOCK_TOKENS,
        shadow: Policy | None = None,
        controllers: Sequence[Controller] = (),
        slo_ttft_s: float | None = None,
        client_concurrency: int | None = None,
        ahead: bool = True,
        cache_reports: CacheReports = "usage",
    ) -> None:
        stale_after_s = STALE_INTERVALS * max(probe_interval_s, scrape_interval_s)
        self.kernel = EventQueue()
        self.router = Router(
            [replica.spec for replica in fleet.replicas],
            policy,
            rng=np.random.default_rng(seed),
            boot_id=f"simulated-{seed}",
            weights=weights,
            limits=limits or RouterLimits(block_tokens=float(block_tokens), stale_after_s=stale_after_s),
            shadow=shadow,
        )
        self.gaps = ItlHistogram()
        self._draws = random_table(seed)
        self.engines: Mapping[str, RemoteReplica] = {
            replica.name: RemoteReplica(
                self.kernel,
                self,
                replica,
                number=number,
                draws=self._draws,
                block_tokens=block_tokens,
                gaps=self.gaps,
                has_samples=self.router.samples.capacity > 0,
                ahead=ahead,
            )
            for number, replica in enumerate(fleet.replicas)
        }
        sites = list(self.engines.values())
        self.caches = CacheReporting(
            cache_reports, self.kernel, self.router, self._carry_out, sites, draws=self._draws, item_tokens=block_tokens
        )
        #: What can go wrong.
        self.injector = FaultInjector(self.kernel, fleet, self.engines, self.caches)
        self._policy = policy
        self._faults = faults
        self._intervals = (probe_interval_s, scrape_interval_s)
        self._controllers = controllers
        self._feed: Sequence[SimRequest] = ()
        self._next = 0
        self._client_concurrency, self._client_waits = client_concurrency or maxsize, False
        self._served = OpenRequests(
            block_tokens=float(block_tokens), slo_ttft_s=slo_ttft_s, kv_hashes=self.caches.hashes
        )
        #: Attempts that have not ended, by id.
        self._attempts: dict[str, tuple[SimAttempt, RemoteReplica]] = {}
        self._deadlines = FirstTokenTimeouts(self.kernel)
        self._timer = RouterTimer(self.kernel, self.router.next_timer, self._wake)
        #: The next connections as of the Router's next event.
        self._connections: dict[str, OpenConnection | None] = {}

    def run(self, feed: Sequence[SimRequest]) -> SimResult:
        """Serve every request of `feed`, which is in the order of arrival."""
        assert not self._served.records, "a simulation runs once"
        self._feed = feed
        self._prepare()
        if feed:
            self.kernel.at(feed[0].arrival_s, self._receive)
            self.kernel.run()
        assert not self._served, "every request has ended"
        preemptions = sum(site.preemptions for site in self.engines.values())
        return SimResult(self._served.records, self.gaps, self.kernel.now, self.kernel.handled, preemptions)

    # -- events of replicas

    def on_connection(self, replica: str, connection: OpenConnection | None) -> None:
        self._connections[replica] = connection

    def on_probe(self, replica: str, rtt_s: float | None) -> None:
        self._carry_out(self._informed().on_probe(replica, rtt_s, now=self.kernel.now))

    def on_sample(self, replica: str, sample: EngineSample | None) -> None:
        self._carry_out(self.router.on_engine_sample(replica, sample, now=self.kernel.now))

    def on_first_token(self, sending: SimAttempt) -> None:
        now = self.kernel.now
        self._served.first_token(sending.request_id, self._attempts[sending.attempt_id][1], now=now)
        self._carry_out(self._informed().on_first_token(sending.attempt_id, now=now))

    def on_end(self, sending: SimAttempt, outcome: Outcome) -> None:
        del self._attempts[sending.attempt_id]
        reported = self.caches.reported(outcome)
        own, others = self._informed().on_finish(sending.attempt_id, reported, now=self.kernel.now)
        # A refusal ends its request if the Router forwards it.
        if isinstance(own, Forward) if outcome.unsent else outcome.result.final:
            self._served.on_result(sending.request_id, outcome, now=self.kernel.now)
            self._stop_if_done()
        self._carry_out(others if own is None or isinstance(own, Forward) else [own, *others])

    # -- the run

    def _prepare(self) -> None:
        if isinstance(self._policy, EngineObserver):
            self._policy.observe(self.engines)
        for site in self.engines.values():
            site.probe_first()
        probe_s, scrape_s = self._intervals
        self.kernel.every(probe_s, partial(self._submit, Monitor.probe))
        self.kernel.every(scrape_s, partial(self._submit, Monitor.scrape))
        self.kernel.every(WARM_INTERVAL_S, partial(self._submit, Monitor.warm))
        for controller in self._controllers:
            self._enqueue(controller)
        for fault in self._faults:
            fault.start(self.injector)

    def _submit(self, action: Callable[[Monitor], None]) -> None:
        for site in self.engines.values():
            action(site.background)

    def _enqueue(self, controller: Controller) -> None:
        if controller.next_s is not None:
            self.kernel.at(max(controller.next_s, self.kernel.now), partial(self._control, controller))

    def _control(self, controller: Controller) -> None:
        controller.act(self._informed(), self.kernel.now)
        self._timer.arm()
        self._enqueue(controller)

    def _receive(self) -> None:
        """The next request of the feed is here, unless its client waits for another one to end."""
        self._client_waits = len(self._served) >= self._client_concurrency
        if self._client_waits:
            return
        request = self._feed[self._next]
        self._next += 1
        now = self.kernel.now
        route_request = self._served.received(request, now=now)
        if self._next < len(self._feed):
            self.kernel.at(max(now, self._feed[self._next].arrival_s), self._receive)
        own, others = self._informed().submit(route_request, now=now)
        self._carry_out([*others, own])

    def _informed(self) -> Router:
        """Return the Router for its next event, with the connections of now."""
        if self._connections:
            for replica, connection in self._connections.items():
                self.router.on_connection(replica, connection, now=self.kernel.now)
            self._connections.clear()
        return self.router

    def _carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Dispatch():
                    self._dispatch(action)
                case Hedge():
                    self._served.hedged(action.request_id)
                    self._dispatch(action.dispatch)
                case Cancel():
                    sending, site = self._attempts[action.attempt_id]
                    site.cancel(sending)
                case Reject():
                    self._served.rejected(action, now=self.kernel.now)
                    self._stop_if_done()
        self._timer.arm()

    def _dispatch(self, dispatch: Dispatch) -> None:
        request = self._served.dispatched(dispatch, now=self.kernel.now)
        sending = SimAttempt(
            dispatch.request_id,
            dispatch.attempt_id,
            request.blocks,
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens,
            body_bytes=request.body_bytes,
            output_key=request.output_blocks,
            trips=TripDelays(self._draws, request.index * KEYS_PER_REQUEST + dispatch.attempt),
        )
        site = self.engines[dispatch.replica]
        self._attempts[dispatch.attempt_id] = sending, site
        self._deadlines.watch(sending, site)
        site.send(sending)

    def _stop_if_done(self) -> None:
        if not self._served and self._next == len(self._feed):
            self.kernel.stop()
        elif self._client_waits:
            self._client_waits = False
            self.kernel.at(self.kernel.now, self._receive)

    def _wake(self) -> None:
        self._carry_out(self._informed().handle_timer(now=self.kernel.now))
