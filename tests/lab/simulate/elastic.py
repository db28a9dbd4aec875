"""A day in virtual time with a fleet that grows and shrinks, under a rule that says how many replicas are wanted.

Owns the fleet's changes (`ElasticFleet`), the rules that are compared, and the made-up day. The simulation and the
Router are those of every other run. A replica that is asked for takes its start-up time and joins with an empty cache;
one that is no longer wanted is drained, and goes when its last answer has ended. Both are paid for.

The Horizontal Pod Autoscaler is modelled by its published algorithm: every 15 s the sum of a metric over the ready
replicas, divided by the target, rounded up; replicas that start count with nothing; no change within 10 % of the
target; and fewer only if no recommendation of the last 5 minutes was higher.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from typing import Protocol

import numpy as np

from gorgo.core.limits import RouterLimits
from gorgo.core.messages.request import EngineSample, OpenConnection, Outcome
from gorgo.core.numeric import Floats
from gorgo.core.prefix.residency import BLOCK_HASH_BYTES
from gorgo.core.router import Router
from gorgo.core.scaling import READ_AT_ONCE, ScalingLimits, ScalingSignal
from gorgo.lab.sim.engine.driver import SimAttempt
from gorgo.lab.sim.faults import FaultInjector
from gorgo.lab.sim.fleet import SimFleet
from gorgo.lab.sim.network import TripDelays, random_table
from gorgo.lab.sim.port import ReplicaPort
from gorgo.lab.sim.records import SimRecord
from gorgo.lab.sim.remote_replica import RemoteReplica
from gorgo.lab.sim.simulation import Simulation
from gorgo.lab.sim.workload import BLOCK_TOKENS, SimRequest
from gorgo.policies.registry import make_policy

#: Time between two samples of what engines do, s; an operator's monitoring is no faster.
SAMPLE_S = 5.0
#: Of the Horizontal Pod Autoscaler: its period, its tolerance, and the window of its stabilisation.
HPA_PERIOD_S, HPA_TOLERANCE, HPA_WINDOW_S = 15.0, 0.1, 300.0
#: Samples of the utilisation whose mean counts: a minute.
UTILISATION_SAMPLES = 12
DAY_S = 86_400.0
#: Newest requests among which the hot beginnings are sought, as of `gorgo serve`.
HOT_AMONG = 4096


@dataclass(frozen=True, slots=True)
class FleetState:
    """What a rule may read: replicas that serve, their engines, and those that start."""

    serving: Sequence[str]
    starting: int
    engines: Mapping[str, RemoteReplica]


class ScalingRule(Protocol):
    """Says how many replicas are wanted, at each sample."""

    def wanted(self, router: Router, fleet: FleetState, *, now: float) -> int: ...


@dataclass(slots=True)
class Static:
    """As many as at the start, always."""

    replicas: int

    def wanted(self, router: Router, fleet: FleetState, *, now: float) -> int:
        return self.replicas


class PredictedAttainment:
    """`gorgo_replicas_wanted`, as `gorgo serve` computes it."""

    def __init__(self, limits: ScalingLimits) -> None:
        self._signal = ScalingSignal(limits)
        self._seq = 0
        self._decided_s = -limits.interval_s

    def wanted(self, router: Router, fleet: FleetState, *, now: float) -> int:
        if now >= self._decided_s + self._signal.limits.interval_s:
            self._decided_s = now
            served = router.view.served_since(self._seq, limit=READ_AT_ONCE)
            self._seq = router.samples.last_seq
            self._signal.decide(router.view.scaling_evidence(now=now), served, now=now)
        return sum(one.wanted for one in self._signal.wanted.values()) or len(fleet.serving)


class PodAutoscaler:
    """The Horizontal Pod Autoscaler.

    Parameters
    ----------
    measure:
        The sum of the metric over the replicas that serve; called at each sample.
    target:
        Of the metric's mean.
    """

    def __init__(
        self, measure: Callable[[Router, FleetState], float], target: float, *, least: int = 1, most: int = 64
    ) -> None:
        self._measure = measure
        self._target = target
        self._bounds = least, most
        self._decided_s = -HPA_PERIOD_S
        self._recommended: deque[tuple[float, int]] = deque()
        self._wanted: int | None = None

    def wanted(self, router: Router, fleet: FleetState, *, now: float) -> int:
        total = self._measure(router, fleet)
        present = len(fleet.serving) + fleet.starting
        if self._wanted is None:
            self._wanted = present
        if now >= self._decided_s + HPA_PERIOD_S and fleet.serving:
            self._decided_s = now
            self._wanted = self._stabilised(self._desired(total, fleet, present), present, now)
        return self._wanted

    def _desired(self, total: float, fleet: FleetState, present: int) -> int:
        ratio = total / (self._target * len(fleet.serving))
        if abs(ratio - 1.0) <= HPA_TOLERANCE:
            return present
        if fleet.starting and ratio > 1.0:
            ratio = total / (self._target * present)
            return present if ratio <= 1.0 + HPA_TOLERANCE else ceil(total / self._target)
        return ceil(total / self._target)

    def _stabilised(self, desired: int, present: int, now: float) -> int:
        least, most = self._bounds
        desired = min(max(desired, least), most)
        self._recommended.append((now, desired))
        while self._recommended[0][0] < now - HPA_WINDOW_S:
            self._recommended.popleft()
        return desired if desired >= present else min(present, max(number for _, number in self._recommended))


class Utilisation:
    """The share of time in which an engine has a request, as the utilisation of its GPU has it; a minute's mean."""

    def __init__(self) -> None:
        self._busy: deque[float] = deque(maxlen=UTILISATION_SAMPLES)

    def __call__(self, router: Router, fleet: FleetState) -> float:
        busy = [any(model.running for model in fleet.engines[name].models) for name in fleet.serving]
        self._busy.append(sum(busy) / max(len(busy), 1))
        return sum(self._busy) / len(self._busy) * len(busy)


def queue_length(router: Router, fleet: FleetState) -> float:
    """Return the requests that wait, at the engines and at the router."""
    return float(router.queued + sum(model.queued for name in fleet.serving for model in fleet.engines[name].models))


def hot_beginnings(feed: Sequence[SimRequest], now: float, *, wanted: int) -> list[bytes]:
    """Return the blocks with which most requests of late begin, the most frequent first.

    What two requests with the same first tokens have in common is their beginning, as in `gorgo serve`.
    """
    until = bisect_right(feed, now, key=lambda one: one.arrival_s)
    recent = feed[max(0, until - HOT_AMONG) : until]
    bodies: dict[int, list[bytes]] = {}
    for one in recent:
        blocks = bodies.setdefault(one.prefix_hash, [])
        if len(blocks) < 2 and one.blocks not in blocks:
            blocks.append(one.blocks)
    counts = Counter(one.prefix_hash for one in recent)
    pairs = (bodies[prefix_hash] for prefix_hash, _ in counts.most_common() if len(bodies[prefix_hash]) == 2)
    return [shared for pair in pairs if (shared := _shared(*pair))][:wanted]


def _shared(one: bytes, other: bytes) -> bytes:
    """Return the blocks with which both begin."""
    size = 0
    while one[size : size + BLOCK_HASH_BYTES] == other[size : size + BLOCK_HASH_BYTES] != b"":
        size += BLOCK_HASH_BYTES
    return one[:size]


class Warming:
    """Sends one replica some beginnings, one after the other, each for one token, and holds its requests meanwhile."""

    def __init__(self, site: RemoteReplica, router: Router, beginnings: Sequence[bytes]) -> None:
        self._site, self._router, self._left = site, router, list(beginnings)
        self._trips = TripDelays(random_table(0), 0)
        self._port: ReplicaPort = site.add_port(self, site.link, self._trips)
        self._next()

    def _next(self) -> None:
        self._router.replicas.warm(self._site.name, warming=bool(self._left))
        if self._left:
            blocks = self._left[0]
            tokens = len(blocks) // BLOCK_HASH_BYTES * BLOCK_TOKENS + 1
            warm = SimAttempt(
                f"warm-{len(self._left)}",
                "",
                blocks,
                prompt_tokens=tokens,
                output_tokens=1,
                body_bytes=0,
                trips=self._trips,
            )
            self._site.send(warm, self._port)

    def on_end(self, sending: SimAttempt, outcome: Outcome) -> None:
        self._router.caches.on_warmed(self._site.name, self._left.pop(0))
        self._next()

    def on_first_token(self, sending: SimAttempt) -> None: ...

    def on_stalled(self, sending: SimAttempt) -> bool:
        return False

    def on_connection(self, replica: str, connection: OpenConnection | None) -> None: ...

    def on_probe(self, replica: str, rtt_s: float | None) -> None: ...

    def on_sample(self, replica: str, sample: EngineSample | None) -> None: ...


@dataclass(slots=True)
class ElasticFleet:
    """The changes of one run's fleet, as a controller of its simulation.

    Parameters
    ----------
    rule:
        Says how many are wanted.
    fleet:
        As many replicas as there can be at most.
    first:
        Replicas at the start.
    startup_s:
        From the wish for a replica to its first request.
    beginnings:
        Returns what a replica that joins is warmed with at a time.
    """

    rule: ScalingRule
    fleet: SimFleet
    first: int
    startup_s: float
    beginnings: Callable[[float], Sequence[bytes]] = lambda _: ()
    injector: FaultInjector | None = None
    next_s: float | None = 0.0
    #: Replicas that are paid for, by the time from which on they were so many.
    paid: list[tuple[float, int]] = field(default_factory=list)
    #: The same of those that serve, and of those that are wanted.
    served: list[tuple[float, int]] = field(default_factory=list)
    wanted: list[tuple[float, int]] = field(default_factory=list)
    _serving: list[int] = field(default_factory=list)
    _starting: list[tuple[float, int]] = field(default_factory=list)
    _draining: list[int] = field(default_factory=list)
    _used: set[int] = field(default_factory=set)

    def act(self, router: Router, now: float) -> None:
        assert self.injector is not None, "the run has given it one"
        if self.next_s == 0.0:
            self._serving = list(range(self.first))
            self._used |= set(self._serving)
        self.next_s = now + SAMPLE_S
        joined = self._join(now)
        if self._leave() or joined or not self.paid:
            self._apply(router, now)
        for name in joined:
            Warming(self.injector.engines[name], router, self.beginnings(now))
        names = [self.fleet.replicas[each].name for each in self._serving]
        state = FleetState(names, len(self._starting), self.injector.engines)
        wanted = min(self.rule.wanted(router, state, now=now), len(self.fleet.replicas))
        self._follow(router, wanted, now)
        for counts, count in (
            (self.paid, len(self._serving) + len(self._starting) + len(self._draining)),
            (self.served, len(self._serving)),
            (self.wanted, wanted),
        ):
            if not counts or counts[-1][1] != count:
                counts.append((now, count))

    def replica_hours(self, until_s: float) -> float:
        """Return what was paid for until then."""
        ends = [begin_s for begin_s, _ in self.paid[1:]] + [until_s]
        spans = zip(self.paid, ends, strict=True)
        return sum(count * max(0.0, min(end_s, until_s) - begin_s) for (begin_s, count), end_s in spans) / 3600.0

    def _follow(self, router: Router, wanted: int, now: float) -> None:
        present = len(self._serving) + len(self._starting)
        while present > wanted and self._starting:
            self._starting.pop()  # the newest is not needed any more
            present -= 1
        while present > max(wanted, 1) and len(self._serving) > 1:
            removed = self._serving.pop()
            self._draining.append(removed)
            router.replicas.drain(self.fleet.replicas[removed].name, now=now)
            present -= 1
        free = (
            each
            for each in range(len(self.fleet.replicas))
            if each not in self._serving
            and each not in self._draining
            and each not in {number for _, number in self._starting}
        )
        for number in list(free)[: max(0, wanted - present)]:
            self._starting.append((now + self.startup_s, number))

    def _join(self, now: float) -> Sequence[str]:
        due = [number for ready_s, number in self._starting if ready_s <= now]
        self._starting = [each for each in self._starting if each[1] not in due]
        assert self.injector is not None, "the run has given it one"
        for number in due:
            name = self.fleet.replicas[number].name
            if number in self._used:
                # Another process: its cache is empty.
                self.injector.kill(name)
                self.injector.revive(name)
            self._used.add(number)
            self._serving.append(number)
        return [self.fleet.replicas[number].name for number in due]

    def _leave(self) -> bool:
        if not self._draining:
            return False
        assert self.injector is not None, "the run has given it one"
        sites = self.injector.engines
        left = [each for each in self._draining if sites[self.fleet.replicas[each].name].ports[0].open_attempts]
        changed = left != self._draining
        self._draining = left
        return changed

    def _apply(self, router: Router, now: float) -> None:
        assert self.injector is not None, "the run has given it one"
        known = router.view.health_states()
        specs = [self.fleet.replicas[each].spec for each in (*self._serving, *self._draining)]
        router.replicas.set_fleet(specs, now=now)
        for spec in specs:
            site = self.injector.engines[spec.name]
            if spec.name not in known and isinstance(site, RemoteReplica):
                site.probe_first()


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticRun:
    """The result of one rule.

    Parameters
    ----------
    attained:
        Share of all requests with a first token within the objective.
    replica_hours, mean_replicas:
        Paid for, from the first request to the last.
    paid, served, wanted:
        Replicas over time, as (time, number).
    """

    rule: str
    attained: float
    replica_hours: float
    mean_replicas: float
    ttft_ms_p95: float | None
    paid: Sequence[tuple[float, int]]
    served: Sequence[tuple[float, int]]
    wanted: Sequence[tuple[float, int]]
    records: Sequence[SimRecord] = ()


def run_elastic(
    name: str,
    rule: ScalingRule,
    fleet: SimFleet,
    feed: Sequence[SimRequest],
    *,
    first: int,
    startup_s: float,
    ttft_s: float,
    limits: RouterLimits,
    policy: str = "gorgo-ms",
    seed: int = 0,
    warm_prompts: int = 0,
) -> ElasticRun:
    """Serve the feed with a fleet that follows `rule`; replicas that join are warmed with so many prompts."""
    elastic = ElasticFleet(rule, fleet, first, startup_s)
    if warm_prompts:
        elastic.beginnings = partial(hot_beginnings, feed, wanted=warm_prompts)
    simulation = Simulation(fleet, make_policy(policy), seed=seed, limits=limits, controllers=[elastic])
    elastic.injector = simulation.injector
    records = simulation.run(feed).records
    until_s = feed[-1].arrival_s
    hours = elastic.replica_hours(until_s)
    ttfts = np.array([np.inf if one.error or one.ttft_ms is None else one.ttft_ms for one in records])
    p95 = float(np.percentile(ttfts, 95, method="higher"))
    return ElasticRun(
        rule=name,
        attained=float((ttfts <= ttft_s * 1e3).mean()),
        replica_hours=hours,
        mean_replicas=hours / (until_s / 3600.0),
        ttft_ms_p95=p95 if np.isfinite(p95) else None,
        paid=elastic.paid,
        served=elastic.served,
        wanted=elastic.wanted,
        records=records,
    )


def day_rate(hours: Floats) -> Floats:
    """Return the relative rate of a made-up working day at the hours of it: low at night, two humps, a surge at ten.

    Example
    -------
    >>> [round(float(rate), 2) for rate in day_rate(np.array([4.0, 10.2, 12.5, 15.0, 20.0]))]
    [0.15, 1.41, 1.07, 1.07, 0.59]
    """
    humps = 0.7 * _hump(hours, 10.5, 2.0) + 0.86 * _hump(hours, 15.0, 2.4) + 0.36 * _hump(hours, 20.5, 1.8)
    surge = 0.45 * ((hours >= 10.0) & (hours < 10.4))
    rate: Floats = 0.15 + humps + surge
    return rate


def _hump(hours: Floats, middle: float, width: float) -> Floats:
    return np.asarray(np.exp(-0.5 * ((hours - middle) / width) ** 2), dtype=float)


def through_the_day(arrivals_s: Floats, *, day_s: float = DAY_S) -> Floats:
    """Return the arrivals of a steady trace, in their order, as they come on the made-up day."""
    grid = np.linspace(0.0, 24.0, 24 * 60 + 1)
    until = np.concatenate(([0.0], np.cumsum((day_rate(grid)[1:] + day_rate(grid)[:-1]) / 2)))
    moved: Floats = np.interp(arrivals_s / arrivals_s[-1] * until[-1], until, grid / 24.0 * day_s)
    return moved
