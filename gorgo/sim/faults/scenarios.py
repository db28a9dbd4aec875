"""Named scenarios: what fleet, what goes wrong, how requests arrive.

Owns the table. A scenario changes a base fleet (three regions as regions.yaml has them), adds faults over the length of
the run, and may move arrivals; policies, trace and load stay the caller's. `nearest` in a description is the replica
with the shortest mean round trip.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from types import MappingProxyType

import numpy as np

from gorgo.core.arrays import Floats
from gorgo.core.fleet.spec import ReplicaSpec
from gorgo.errors import ScenarioError, UnknownScenario
from gorgo.sim.engine.profiles import EngineProfile, find_profile
from gorgo.sim.faults.kinds import (
    DelaySpikes,
    Fault,
    Kill,
    PeriodicStall,
    RttShift,
    Slow,
    StaleMetrics,
    StaleProbes,
    region_rtt_s,
)
from gorgo.sim.fleet import SimFleet, SimReplica

#: A faster engine, for a fleet that has both.
OTHER_PROFILE = "1xH100-Qwen3.5-35B-A3B-FP8"
SHIFTED_REGION, SHIFTED_RTT_S = "eu-frankfurt", 0.320
LOCAL_RTT_S = 0.002
#: Requests of each period arrive in its first seconds.
BURST_EVERY_S, BURST_LASTS_S = 30.0, 5.0
#: After the last arrival requests may run on; faults that repeat go on so long, s.
_DRAIN_S = 600.0


def _same(fleet: SimFleet) -> SimFleet:
    return fleet


def _none(_fleet: SimFleet, _duration_s: float) -> Sequence[Fault]:
    return ()


def _as_they_are(arrivals_s: Floats) -> Floats:
    return arrivals_s


@dataclass(frozen=True, slots=True)
class Scenario:
    """One named variation of a run.

    Parameters
    ----------
    description:
        What happens, in a line of the README's table.
    fleet:
        From the base fleet to the one that runs; raises `ScenarioError` if the base lacks what it needs.
    faults:
        What goes wrong in a run of so many seconds on that fleet; raises `ScenarioError` likewise.
    reshape:
        From arrival times (ascending, s) to others, as many and as many per second on average, still ascending.
    """

    name: str
    description: str
    fleet: Callable[[SimFleet], SimFleet] = _same
    faults: Callable[[SimFleet, float], Sequence[Fault]] = _none
    reshape: Callable[[Floats], Floats] = _as_they_are


def find_scenario(name: str) -> Scenario:
    """The scenario of that name; raises `UnknownScenario`, which lists the names there are.

    Example
    -------
    >>> find_scenario("steady").reshape(np.array([0.0, 31.0])).tolist()
    [0.0, 31.0]
    """
    try:
        return SCENARIOS[name]
    except KeyError:
        raise UnknownScenario(f"no scenario named {name!r}; there are: {', '.join(SCENARIOS)}") from None


def nearest(fleet: SimFleet) -> SimReplica:
    """The replica with the shortest mean round trip, the first of equals."""
    return min(fleet.replicas, key=lambda replica: replica.link.rtt_s)


def with_accurate_priors(fleet: SimFleet) -> SimFleet:
    """The same fleet, the Router told of each replica what its engine is: KV pool, batch, time of a prefill."""
    return _each(fleet, lambda replica: _with_reported(replica, replica.profile))


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


def _each(fleet: SimFleet, change: Callable[[SimReplica], SimReplica]) -> SimFleet:
    return replace(fleet, replicas=tuple(map(change, fleet.replicas)))


def _with_reported(replica: SimReplica, profile: EngineProfile, *, faster: float = 1.0) -> SimReplica:
    """Return a replica whose configured profile is `profile` with prefills `faster` times as fast."""
    spec = replace(
        replica.spec,
        kv_capacity_tokens=profile.kv_tokens,
        max_running_requests=profile.max_running_requests,
        prefill_base_s=profile.prefill_base_s / faster,
        prefill_tokens_per_s=profile.prefill_tokens_per_s * faster,
        prefill_kappa_s=profile.prefill_kappa_s / faster,
    )
    return replace(replica, spec=spec)


def _with_priors(faster: float) -> Callable[[SimFleet], SimFleet]:
    return lambda fleet: _each(fleet, lambda replica: _with_reported(replica, replica.profile, faster=faster))


def _mixed(fleet: SimFleet) -> SimFleet:
    """The second nearest replica is the faster one: what is near and what is fast are not the same."""
    if len(fleet.replicas) < 2:
        raise ScenarioError("scenario 'mixed-fleet' needs two replicas; the fleet has one")
    chosen = sorted(fleet.replicas, key=lambda replica: replica.link.rtt_s)[1]
    faster = find_profile(OTHER_PROFILE)
    changed = _each(fleet, lambda replica: replace(replica, profile=faster) if replica is chosen else replica)
    return with_accurate_priors(changed)


def _finding(*, hit_share: float = 1.0, checkpoint_tokens: int = 1) -> Callable[[SimFleet], SimFleet]:
    """Engines that find part of each cached prefix; the Router is not configured with it."""

    def changed(replica: SimReplica) -> SimReplica:
        profile = replace(replica.profile, hit_share=hit_share, checkpoint_tokens=checkpoint_tokens)
        return replace(replica, profile=profile)

    return lambda fleet: _each(fleet, changed)


def _two_per_region(fleet: SimFleet) -> SimFleet:
    """A region with one replica gets another like it."""
    taken = {replica.name for replica in fleet.replicas}
    replicas = list(fleet.replicas)
    for replica in fleet.replicas:
        if sum(each.region == replica.region for each in replicas) < 2:
            name = next(name for n in count() if (name := f"{replica.region}-{n}") not in taken)
            taken.add(name)
            replicas.append(replace(replica, spec=replace(replica.spec, name=name)))
    return replace(fleet, replicas=tuple(replicas))


def _one_region(fleet: SimFleet) -> SimFleet:
    region = nearest(fleet).region

    def moved(replica: SimReplica) -> SimReplica:
        spec: ReplicaSpec = replace(replica.spec, region=region)
        return replace(replica, spec=spec, link=replace(replica.link, rtt_s=LOCAL_RTT_S))

    return _each(fleet, moved)


# -- faults


def _slow_nearest(fleet: SimFleet, duration_s: float) -> Sequence[Fault]:
    return [Slow(nearest(fleet).name, 3.0, duration_s / 3, duration_s * 2 / 3)]


def _rtt_shift(fleet: SimFleet, duration_s: float) -> Sequence[Fault]:
    region_rtt_s(fleet, SHIFTED_REGION)  # says so if nobody is there
    return [RttShift(SHIFTED_REGION, SHIFTED_RTT_S, duration_s / 2)]


def _killed(fleet: SimFleet, duration_s: float) -> Sequence[Fault]:
    return [Kill(nearest(fleet).name, duration_s / 3, duration_s / 2)]


def _stale(_fleet: SimFleet, duration_s: float) -> Sequence[Fault]:
    start_s, end_s = duration_s / 3, duration_s * 2 / 3
    return [StaleMetrics(None, start_s, end_s), StaleProbes(None, start_s, end_s)]


def _periodic_stalls(fleet: SimFleet, duration_s: float) -> Sequence[Fault]:
    return [PeriodicStall(nearest(fleet).name, duration_s + _DRAIN_S)]


def _late_path(fleet: SimFleet, _duration_s: float) -> Sequence[Fault]:
    return [DelaySpikes(region) for region in dict.fromkeys(replica.region for replica in fleet.replicas)]


_TABLE = (
    Scenario("steady", "nothing goes wrong"),
    Scenario("slow-replica", "the nearest replica is 3x slower for the middle third of the run", faults=_slow_nearest),
    Scenario("rtt-shift", "the round trip to `eu-frankfurt` becomes 320 ms half way through", faults=_rtt_shift),
    Scenario("killed", "the nearest replica is down from a third to a half of the run, then back cold", faults=_killed),
    Scenario("stale-metrics", "no replica answers scrapes or pings in the middle third of the run", faults=_stale),
    Scenario("mixed-fleet", "the second nearest replica is one H100, with right priors for each replica", fleet=_mixed),
    Scenario("six-replicas", "a second replica in each region that has one", fleet=_two_per_region),
    Scenario("one-region", "all replicas in the nearest region, at 2 ms", fleet=_one_region),
    Scenario("bursts", "the requests of every 30 s arrive in its first 5 s", reshape=burst),
    Scenario("freezing", "the nearest replica is 40x slower for 8 s in every 100 s", faults=_periodic_stalls),
    Scenario("late-path", "1.5 % of requests are delayed by 1 to 3 s", faults=_late_path),
    Scenario("priors-fast", "priors of the prefill speed are 3x too fast", fleet=_with_priors(3.0)),
    Scenario("priors-slow", "priors of the prefill speed are 3x too slow", fleet=_with_priors(1 / 3)),
    Scenario("partial-hits-30", "engines find 30 % of each cached prefix", fleet=_finding(hit_share=0.3)),
    Scenario("partial-hits-60", "engines find 60 % of each cached prefix", fleet=_finding(hit_share=0.6)),
    Scenario(
        "checkpoints-1024",
        "engines find cached prefixes in multiples of 1,024 tokens",
        fleet=_finding(checkpoint_tokens=1024),
    ),
)

#: Every scenario by name, in the order of the README's table.
SCENARIOS: Mapping[str, Scenario] = MappingProxyType({scenario.name: scenario for scenario in _TABLE})
