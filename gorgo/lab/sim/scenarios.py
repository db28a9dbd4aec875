"""Scenarios: what a run has beside its fleet, policy, trace and load, by name or from a file of one's own.

Owns the record, whose keys are those of a file (`read_scenario`), and the table of named scenarios, which are such
records. A scenario changes a base fleet and its network, places clients and routers, adds faults over the length of the
run, and may move arrivals. Leaves what a fault does to `gorgo.lab.sim.faults`, and where clients and routers are
to `gorgo.lab.sim.topology`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from itertools import count, pairwise
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from pydantic import Field, PlainValidator

from gorgo.config.load import load_settings
from gorgo.config.values import Count, Name, NotNegative, Positive, Text, strict
from gorgo.core.fleet.replica import ReplicaSpec
from gorgo.core.numeric import Floats
from gorgo.errors import ScenarioError, UnknownProfile, UnknownReplica, UnknownScenario
from gorgo.lab.sim.engine.profiles import find_profile
from gorgo.lab.sim.faults import (
    DelaySpikes,
    Drain,
    FailFast,
    Fault,
    Hang,
    Kill,
    Partition,
    PeriodicStall,
    RttShift,
    Slow,
    StaleMetrics,
    StaleProbes,
    replicas_in,
)
from gorgo.lab.sim.fleet import SimFleet, SimReplica, with_accurate_priors, with_priors_of
from gorgo.lab.sim.network import Link
from gorgo.lab.sim.topology import Topology

#: A faster engine, for a fleet that has both.
OTHER_PROFILE = "1xH100-Qwen3.5-35B-A3B-FP8"
#: Requests of each period arrive in its first seconds.
BURST_EVERY_S, BURST_LASTS_S = 30.0, 5.0
#: After the last arrival requests may run on; faults that repeat go on so long, s.
_DRAIN_S = 600.0
#: Words for a replica by its round trip from the router; a replica of that name comes first.
BY_DISTANCE = ("nearest", "second-nearest")
#: What ends the name of a file.
SUFFIXES = (".yaml", ".yml")

_SHARE = re.compile(r"(\d{1,4})/(\d{1,4})")


def _moment(value: object) -> float | str:
    if isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value) and value >= 0:
        return float(value)
    match = _SHARE.fullmatch(value) if isinstance(value, str) else None
    if match is None or not int(match[1]) <= int(match[2]) or not int(match[2]):
        raise ValueError("seconds from the start, or a share of the run as 1/3")
    return match[0]


#: Seconds from the start of a run, or a share of the time to its last arrival, as `1/3`.
Moment: TypeAlias = Annotated[float | str, PlainValidator(_moment)]
Share = Annotated[float, Field(ge=0, le=1)]
Kind = Literal[
    "slow", "kill", "hang", "drain", "fail-fast", "periodic-stall", "stale-metrics", "stale-probes", "partition",
    "rtt-shift", "delay-spikes",
]  # fmt: skip
KINDS: Mapping[Kind, Callable[..., Fault]] = MappingProxyType({
    "slow": Slow, "kill": Kill, "hang": Hang, "drain": Drain, "fail-fast": FailFast, "periodic-stall": PeriodicStall,
    "stale-metrics": StaleMetrics, "stale-probes": StaleProbes, "partition": Partition, "rtt-shift": RttShift,
    "delay-spikes": DelaySpikes,
})  # fmt: skip
#: Fields of a fault that a file has under another name.
_KEYS = {"start_s": "start", "end_s": "end", "rtt_s": "rtt_ms"}


def seconds(moment: float | str, duration_s: float) -> float:
    """Return a moment of a run of that length, s.

    >>> seconds("2/3", 600.0), seconds(60.0, 600.0)
    (400.0, 60.0)
    """
    if isinstance(moment, float):
        return moment
    part, whole = map(int, moment.split("/"))
    return duration_s * part / whole


@strict
@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFault:
    """One thing that goes wrong.

    Parameters
    ----------
    kind:
        Which of the faults (`KINDS`); the other keys are those of its record.
    replica, region:
        Whose; a replica by name or by distance. None: every one.
    start, end:
        From when to when; without an end it lasts.
    """

    kind: Kind
    replica: Name | None = None
    region: Name | None = None
    start: Moment = 0.0
    end: Moment | None = None
    factor: Positive | None = None
    rtt_ms: NotNegative | None = None
    status: Annotated[int, Field(ge=400, le=599)] | None = None
    lasts_s: Positive | None = None
    every_s: Positive | None = None
    share: Share | None = None
    low_s: NotNegative | None = None
    high_s: NotNegative | None = None

    def planned(self, fleet: SimFleet, duration_s: float) -> list[Fault]:
        """Return the faults of a run; raises `ScenarioError` or `UnknownReplica` for a target that is not there."""
        make, takes = KINDS[self.kind], _fields_of(self.kind)
        values: dict[str, Any] = {}
        for name in takes:
            value = getattr(self, _KEYS.get(name, name))
            if value is None or name in ("replica", "region"):
                continue
            if name in ("start_s", "end_s"):
                value = seconds(value, duration_s)
            values[name] = value / 1e3 if name == "rtt_s" else value
        if self.kind == "periodic-stall":
            values.setdefault("end_s", duration_s + _DRAIN_S)
        target = "replica" if "replica" in takes else "region"
        return [make(**{target: one, **values}) for one in self._targets(fleet)]

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """Yield key, what is wrong with it, and what was expected."""
        takes = [_KEYS.get(name, name) for name in _fields_of(self.kind)]
        for one in fields(self):
            key, given = one.name, getattr(self, one.name) is not None
            if given and key not in ("kind", "start", *takes):
                yield key, f"no key of {self.kind}", f"one of {', '.join(('kind', *takes))}"
            if not given and key in takes and _is_needed(self.kind, key):
                yield key, "missing", f"this key for {self.kind}"
        if self.end is not None and not _ascends(self.start, self.end):
            yield "end", f"{self.end} is no later than start", "an end behind the start"
        if self.low_s is not None and self.high_s is not None and self.low_s > self.high_s:
            yield "high_s", f"{self.high_s:g} is below low_s", "at least low_s"
        if self.kind == "periodic-stall" and (self.lasts_s or 8.0) >= (self.every_s or 100.0):
            yield "lasts_s", f"{self.lasts_s or 8.0:g} is not below every_s", "less than every_s"

    def _targets(self, fleet: SimFleet) -> Sequence[str | None]:
        if "region" in _fields_of(self.kind):
            if self.region is None:
                return list(dict.fromkeys(replica.region for replica in fleet.replicas))
            replicas_in(fleet, self.region)
            return [self.region]
        if self.replica is not None:
            return [find_replica(fleet, self.replica).name]
        alone = self.kind in ("stale-metrics", "stale-probes")  # one of these is of all replicas
        return [None] if alone else [replica.name for replica in fleet.replicas]


def _fields_of(kind: Kind) -> list[str]:
    """Return the fields of a fault's record, what it is about first."""
    return [one.name for one in fields(KINDS[kind])]  # type: ignore[arg-type]  # a dataclass, called to make one


def _is_needed(kind: Kind, key: str) -> bool:
    """Return whether a fault's record has no default for a value; a target and a time have one in a file."""
    needed = [one.name for one in fields(KINDS[kind]) if one.default is MISSING]  # type: ignore[arg-type]  # as above
    return key in [_KEYS.get(name, name) for name in needed] and key not in ("replica", "region", "start", "end")


def _ascends(start: float | str, end: float | str) -> bool:
    """Return whether one moment is before the other; of seconds and a share of an unknown time it may be."""
    return isinstance(start, str) != isinstance(end, str) or seconds(start, 1.0) < seconds(end, 1.0)


@strict
@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileChange:
    """Another engine of one replica, with right priors for all."""

    replica: Name
    name: Text


@strict
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How engines find cached prefixes; the Router is not configured with it."""

    hit_share: Share = 1.0
    checkpoint_tokens: Count = 1


@strict
@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """Another fleet than the one that was given.

    Parameters
    ----------
    profile:
        Another engine of a replica.
    engines:
        Of all replicas.
    priors_faster:
        The Router is told of each engine that its prefills are so many times as fast as they are.
    least_per_region:
        Each region has at least so many replicas: copies of its first.
    one_region_rtt_ms:
        All replicas are in the nearest region, at this round trip.
    """

    profile: ProfileChange | None = None
    engines: EngineSettings | None = None
    priors_faster: Positive | None = None
    least_per_region: Annotated[int, Field(ge=1, le=64)] = 1
    one_region_rtt_ms: NotNegative | None = None

    def applied_to(self, fleet: SimFleet) -> SimFleet:
        """Return the fleet with the changes; raises `UnknownReplica` and `UnknownProfile`."""
        if self.profile is not None:
            fleet = _with_profile(fleet, self.profile)
        if self.engines is not None:
            fleet = _finding(fleet, self.engines)
        if self.priors_faster is not None:
            fleet = _with_priors(fleet, self.priors_faster)
        if self.least_per_region > 1:
            fleet = _so_many_per_region(fleet, self.least_per_region)
        return fleet if self.one_region_rtt_ms is None else _one_region(fleet, self.one_region_rtt_ms / 1e3)


@strict
@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSettings:
    """Another network than the fleet's.

    Parameters
    ----------
    rtt_ms:
        Mean round trip between two regions, either way round: a matrix. Empty: the fleet's, from its router.
    local_rtt_ms:
        Within a region, where the matrix has none of it.
    jitter, spike_probability:
        As in `Link`. None: as the fleet has them.
    bandwidth_mbps:
        At which the body of each request is sent, alone. None: no time.
    tcp_windows:
        Whether a body waits for the windows of its connection.
    """

    rtt_ms: Mapping[Name, Mapping[Name, NotNegative]] = field(default_factory=dict)
    local_rtt_ms: NotNegative = 2.0
    jitter: Annotated[float, Field(ge=0, le=10)] | None = None
    spike_probability: Share | None = None
    bandwidth_mbps: Positive | None = None
    tcp_windows: bool = True

    def applied(self, link: Link) -> Link:
        """Return a link with the parameters of this network and its own round trip."""
        return replace(
            link,
            jitter=link.jitter if self.jitter is None else self.jitter,
            spike_probability=link.spike_probability if self.spike_probability is None else self.spike_probability,
            bytes_per_s=link.bytes_per_s if self.bandwidth_mbps is None else self.bandwidth_mbps * 1e6 / 8,
            tcp_windows=link.tcp_windows and self.tcp_windows,
        )

    def matrix(self) -> dict[tuple[str, str], Link]:
        """Return the link of every pair, in the order of the file."""
        return {
            (one, other): self.applied(Link(rtt_s=rtt_ms / 1e3))
            for one, rtts in self.rtt_ms.items()
            for other, rtt_ms in rtts.items()
        }

    def problems(self) -> Iterator[tuple[tuple[str, ...], str, str]]:
        """Yield the key of what contradicts itself, what it is, and what was expected."""
        before: dict[tuple[str, str], float] = {}
        for one, rtts in self.rtt_ms.items():
            for other, rtt_ms in rtts.items():
                back = before.get((other, one), rtt_ms)
                before[one, other] = rtt_ms
                if back != rtt_ms:
                    yield ("rtt_ms", one, other), f"{rtt_ms:g}", f"{back:g}, as from {other} to {one}"


@strict
@dataclass(frozen=True, slots=True, kw_only=True)
class Bursts:
    """The requests of every `every_s` arrive in its first `lasts_s`."""

    every_s: Positive = BURST_EVERY_S
    lasts_s: Positive = BURST_LASTS_S


@strict
@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One variation of a run; a file has these keys.

    Parameters
    ----------
    name, description:
        What happens, in a word and in a line. The name of a file's is by default the file's.
    fleet, network:
        What is unlike the fleet that was given.
    routers:
        The region of each router; with more than one, clients go to the nearest.
    clients:
        Share of the clients in each region; whole sessions are of one. Empty: all are beside the router.
    faults:
        What goes wrong.
    arrivals:
        How requests come, as many and as many per second on average. None: as they are in the trace.
    """

    name: Name = "unnamed"
    description: Text = "a scenario of one's own"
    fleet: FleetSettings = FleetSettings()
    network: NetworkSettings = NetworkSettings()
    routers: tuple[Name, ...] = ()
    clients: Mapping[Name, Positive] = field(default_factory=dict)
    faults: tuple[PlannedFault, ...] = ()
    arrivals: Bursts | None = None

    @property
    def topology(self) -> Topology | None:
        """Return where routers and clients are; None: beside each other, as the fleet has its links."""
        if not self.routers:
            return None
        local = self.network.applied(Link(rtt_s=self.network.local_rtt_ms / 1e3))
        return Topology(links=self.network.matrix(), local=local, routers=self.routers, clients=self.clients)

    def applied_to(self, fleet: SimFleet) -> SimFleet:
        """Return the fleet that runs, with links from the first router; raises `ScenarioError` and the like."""
        changed, topology = self.fleet.applied_to(fleet), self.topology
        if topology is not None:
            topology.check(changed)
            return topology.fleet_of(changed, 0)
        if self.network == NetworkSettings():
            return changed
        return changed.changed(lambda replica: replace(replica, link=self.network.applied(replica.link)))

    def planned(self, fleet: SimFleet, duration_s: float) -> list[Fault]:
        """Return the faults of a run of so many seconds on that fleet; raises `ScenarioError` and `UnknownReplica`."""
        return [fault for one in self.faults for fault in one.planned(fleet, duration_s)]

    def moved(self, arrivals_s: Floats) -> Floats:
        """Return arrival times (ascending, s) as this scenario has them, still ascending."""
        if self.arrivals is None:
            return arrivals_s
        return burst(arrivals_s, every_s=self.arrivals.every_s, lasts_s=self.arrivals.lasts_s)


def find_scenario(given: str | Scenario) -> Scenario:
    """The scenario of that name, or the one that is given; raises `UnknownScenario`, which lists the names there are.

    Example
    -------
    >>> find_scenario("steady").moved(np.array([0.0, 31.0])).tolist()
    [0.0, 31.0]
    """
    if isinstance(given, Scenario):
        return given
    try:
        return SCENARIOS[given]
    except KeyError:
        names = ", ".join(SCENARIOS)
        raise UnknownScenario(f"no scenario named {given!r}; there are: {names}, and files *.yaml") from None


def chosen_scenario(given: str | Path | Scenario, fleet: SimFleet) -> str | Scenario:
    """Return a scenario for that fleet: a name as it is, and a file (`*.yaml`) read.

    Raises `ConfigError` for a file, `UnknownScenario`, and `ScenarioError` and the like where it does not fit.
    """
    if isinstance(given, str) and not given.endswith(SUFFIXES):
        find_scenario(given)
        return given
    if isinstance(given, Scenario):
        return given
    path = Path(given)
    scenario = read_scenario(path)
    try:
        scenario.planned(scenario.applied_to(fleet), 1.0)
    except (ScenarioError, UnknownProfile, UnknownReplica) as error:
        raise type(error)(f"{path}: {error}") from None
    return scenario


def read_scenario(path: Path) -> Scenario:
    """Return the scenario of a file; raises `ConfigError` with file, line and key of each error."""
    scenario = load_settings(path, Scenario, further=_problems)
    return scenario if scenario.name != "unnamed" else replace(scenario, name=_name_of(path))


def as_document(scenario: Scenario) -> dict[str, Any]:
    """Return the content of a file of that scenario: what differs from the defaults.

    >>> as_document(SCENARIOS["bursts"])["arrivals"]
    {'every_s': 30.0, 'lasts_s': 5.0}
    """
    return _given(asdict(scenario), asdict(Scenario())) | {"name": scenario.name, "description": scenario.description}


def _given(values: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for key, value in values.items():
        before = usual.get(key)
        if isinstance(value, Mapping):
            value = _given(value, before if isinstance(before, Mapping) else {})
        elif isinstance(value, tuple):
            value = [_given(one, {}) if isinstance(one, Mapping) else one for one in value]
        if value is not None and value not in ({}, [], ()) and value != before:
            given[key] = value
    return given


def _name_of(path: Path) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", path.stem).lstrip("._-")[:63] or "unnamed"


def _problems(scenario: Scenario) -> Iterator[tuple[tuple[str | int, ...], str, str]]:
    """Yield path, found and expected of what the types of keys do not say."""
    for number, fault in enumerate(scenario.faults):
        for key, found, expected in fault.problems():
            yield ("faults", number, key), found, expected
    for path, found, expected in scenario.network.problems():
        yield ("network", *path), found, expected
    if scenario.arrivals is not None and scenario.arrivals.lasts_s > scenario.arrivals.every_s:
        yield ("arrivals", "lasts_s"), f"{scenario.arrivals.lasts_s:g}", "at most every_s"
    if scenario.routers and not scenario.network.rtt_ms:
        yield ("network", "rtt_ms"), "missing", "round trips between the regions of routers, clients and replicas"
    if not scenario.routers and (scenario.clients or scenario.network.rtt_ms):
        yield ("routers",), "missing", "the region of each router, as [us-ashburn]"
    if len(scenario.routers) > 1 and not scenario.clients:
        yield ("clients",), "missing", "the share of the clients in each region, as {us-ashburn: 0.6, ap-seoul: 0.4}"
    if any(one == other for one, other in pairwise(sorted(scenario.routers))):
        yield ("routers",), "a region twice", "one router in a region"


def find_replica(fleet: SimFleet, name: str) -> SimReplica:
    """Return a replica by its name, or by its distance (`nearest`, `second-nearest`); raises `UnknownReplica`."""
    named = next((replica for replica in fleet.replicas if replica.name == name), None)
    if named is not None:
        return named
    if name not in BY_DISTANCE:
        names = ", ".join([replica.name for replica in fleet.replicas])
        raise UnknownReplica(f"no replica named {name!r}; the fleet has: {names}")
    rank = BY_DISTANCE.index(name)
    if rank >= len(fleet.replicas):
        raise ScenarioError(f"{name!r} needs two replicas; the fleet has one")
    return sorted(fleet.replicas, key=lambda replica: replica.link.rtt_s)[rank]


def nearest(fleet: SimFleet) -> SimReplica:
    """The replica with the shortest mean round trip, the first of equals."""
    return min(fleet.replicas, key=lambda replica: replica.link.rtt_s)


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


def _with_priors(fleet: SimFleet, faster: float) -> SimFleet:
    return fleet.changed(lambda replica: with_priors_of(replica, replica.profile, faster=faster))


def _with_profile(fleet: SimFleet, change: ProfileChange) -> SimFleet:
    chosen, profile = find_replica(fleet, change.replica), find_profile(change.name)
    changed = fleet.changed(lambda replica: replace(replica, profile=profile) if replica is chosen else replica)
    return with_accurate_priors(changed)


def _finding(fleet: SimFleet, change: EngineSettings) -> SimFleet:
    def changed(replica: SimReplica) -> SimReplica:
        profile = replace(replica.profile, hit_share=change.hit_share, checkpoint_tokens=change.checkpoint_tokens)
        return replace(replica, profile=profile)

    return fleet.changed(changed)


def _so_many_per_region(fleet: SimFleet, least: int) -> SimFleet:
    """A region with fewer replicas gets others like its first."""
    taken = {replica.name for replica in fleet.replicas}
    replicas = list(fleet.replicas)
    for replica in fleet.replicas:
        while sum(each.region == replica.region for each in replicas) < least:
            name = next(name for n in count() if (name := f"{replica.region}-{n}") not in taken)
            taken.add(name)
            replicas.append(replace(replica, spec=replace(replica.spec, name=name)))
    return replace(fleet, replicas=tuple(replicas))


def _one_region(fleet: SimFleet, rtt_s: float) -> SimFleet:
    region = nearest(fleet).region

    def moved(replica: SimReplica) -> SimReplica:
        spec: ReplicaSpec = replace(replica.spec, region=region)
        return replace(replica, spec=spec, link=replace(replica.link, rtt_s=rtt_s))

    return fleet.changed(moved)


# -- the table


def _built_in() -> Iterator[Scenario]:
    yield Scenario(name="steady", description="nothing goes wrong")
    yield Scenario(
        name="slow-replica",
        description="the nearest replica is 3x slower for the middle third of the run",
        faults=(PlannedFault(kind="slow", replica="nearest", factor=3.0, start="1/3", end="2/3"),),
    )
    yield Scenario(
        name="rtt-shift",
        description="the round trip to `eu-frankfurt` becomes 320 ms half way through",
        faults=(PlannedFault(kind="rtt-shift", region="eu-frankfurt", rtt_ms=320.0, start="1/2"),),
    )
    yield Scenario(
        name="killed",
        description="the nearest replica is down from a third to a half of the run, then back cold",
        faults=(PlannedFault(kind="kill", replica="nearest", start="1/3", end="1/2"),),
    )
    yield Scenario(
        name="hung",
        description="the nearest replica hangs from a third to a half of the run, then restarts cold",
        faults=(PlannedFault(kind="hang", replica="nearest", start="1/3", end="1/2"),),
    )
    yield Scenario(
        name="drained",
        description="the nearest replica is drained with its streams, and back half way",
        faults=(PlannedFault(kind="drain", replica="nearest", start="1/3", end="1/2"),),
    )
    yield Scenario(
        name="stale-metrics",
        description="no replica answers scrapes or pings in the middle third of the run",
        faults=(
            PlannedFault(kind="stale-metrics", start="1/3", end="2/3"),
            PlannedFault(kind="stale-probes", start="1/3", end="2/3"),
        ),
    )
    yield Scenario(
        name="mixed-fleet",
        description="the second nearest replica is one H100, with right priors for each replica",
        fleet=FleetSettings(profile=ProfileChange(replica="second-nearest", name=OTHER_PROFILE)),
    )
    yield Scenario(
        name="six-replicas",
        description="a second replica in each region that has one",
        fleet=FleetSettings(least_per_region=2),
    )
    yield Scenario(
        name="one-region",
        description="all replicas in the nearest region, at 2 ms",
        fleet=FleetSettings(one_region_rtt_ms=2.0),
    )
    yield Scenario(name="bursts", description="the requests of every 30 s arrive in its first 5 s", arrivals=Bursts())
    yield Scenario(
        name="freezing",
        description="the nearest replica is 40x slower for 8 s in every 100 s",
        faults=(PlannedFault(kind="periodic-stall", replica="nearest"),),
    )
    yield Scenario(
        name="late-path",
        description="1.5 % of requests are delayed by 1 to 3 s",
        faults=(PlannedFault(kind="delay-spikes"),),
    )
    for name, factor, word in (("priors-fast", 3.0, "fast"), ("priors-slow", 1 / 3, "slow")):
        yield Scenario(
            name=name,
            description=f"priors of the prefill speed are 3x too {word}",
            fleet=FleetSettings(priors_faster=factor),
        )
    for percent in (30, 60):
        yield Scenario(
            name=f"partial-hits-{percent}",
            description=f"engines find {percent} % of each cached prefix",
            fleet=FleetSettings(engines=EngineSettings(hit_share=percent / 100)),
        )
    yield Scenario(
        name="checkpoints-1024",
        description="engines find cached prefixes in multiples of 1,024 tokens",
        fleet=FleetSettings(engines=EngineSettings(checkpoint_tokens=1024)),
    )


#: Every scenario by name, in the order of the page's table.
SCENARIOS: Mapping[str, Scenario] = MappingProxyType({scenario.name: scenario for scenario in _built_in()})
