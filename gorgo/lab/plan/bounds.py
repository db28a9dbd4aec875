"""Lower bounds: fleets that cannot meet the objectives, whatever their router does, without a simulation.

Theory of operation. Each bound is true of every schedule, so that no fleet which would do is left out. At most
`1 - share` of a region's requests may miss; a bound leaves out that many of all requests, those that ask for most.

- Distance. `lower_bound` says what each request takes alone on the best replica of the fleet, with everything seen
  before in its cache. If too few meet their bounds even so, the kinds of the fleet are too far away or too slow.
- Prefill. What arrives within a window of length w has to be prefilled until the objective S after its end. So the
  fleet's prefill rates have to reach the window's tokens, less those that an earlier prompt had, over w + S.
- Decode. With an objective of the whole answer E, the window's output tokens have to be there within w + E, and no
  engine makes more of them than with its fullest batch.
- KV pool. From its first token a request holds its own tokens until its last one, no shorter than it takes alone on
  the fastest engine. The sum of tokens times seconds has to fit into the pools.

The last three are one number each: the least that the replicas' rates have to add up to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from gorgo.core.fleet.replica import ReplicaSpec
from gorgo.core.numeric import Floats
from gorgo.lab.plan.demand import Demand
from gorgo.lab.plan.settings import Kind, Objective
from gorgo.lab.sim.engine.profiles import EngineProfile
from gorgo.lab.sim.fleet import SimFleet, SimReplica
from gorgo.lab.sim.lower_bound import LowerBound, cached_tokens, lower_bound
from gorgo.lab.sim.network import Link

#: Lengths of the windows, s: a burst, a busy minute and quarter of an hour, and the peak of a day.
WINDOWS_S = (2.0, 30.0, 900.0, 7200.0)


@dataclass(frozen=True, slots=True)
class Rates:
    """What a fleet needs at least, or what one replica has: prefilled and output tokens per s, and tokens of KV."""

    prefill: float = 0.0
    decode: float = 0.0
    kv: float = 0.0

    def covers(self, needed: Rates) -> bool:
        return self.prefill >= needed.prefill and self.decode >= needed.decode and self.kv >= needed.kv

    def plus(self, other: Rates, count: int) -> Rates:
        return Rates(
            self.prefill + count * other.prefill, self.decode + count * other.decode, self.kv + count * other.kv
        )


class LowerBounds:
    """The bounds of one demand on fleets of these kinds.

    Parameters
    ----------
    demand:
        Of all clients, with their objectives.
    kinds:
        What a fleet can have; fleets are counts in this order.
    """

    def __init__(self, demand: Demand, kinds: Sequence[Kind]) -> None:
        self._origins = np.array(demand.origins)
        self._groups = demand.groups
        self._rates = [_rates_of(kind.profile) for kind in kinds]
        self._alone = [_alone(demand, kind) for kind in kinds]
        self._near_enough: dict[tuple[bool, ...], bool] = {}
        self.needed = _needed(demand, kinds)

    def excludes(self, fleet: Sequence[int]) -> bool:
        """Return whether no router can meet the objectives with the fleet."""
        has = Rates()
        for count, rates in zip(fleet, self._rates, strict=True):
            has = has.plus(rates, count)
        return not has.covers(self.needed) or not self._is_near(tuple(count > 0 for count in fleet))

    def _is_near(self, present: tuple[bool, ...]) -> bool:
        found = self._near_enough.get(present)
        if found is None:
            found = self._near_enough[present] = self._meets_alone(present)
        return found

    def _meets_alone(self, present: tuple[bool, ...]) -> bool:
        ttft_s, e2e_s = np.full(len(self._origins), inf), np.full(len(self._origins), inf)
        for alone, is_there in zip(self._alone, present, strict=True):
            if is_there:
                ttft_s, e2e_s = np.minimum(ttft_s, alone.ttft_s), np.minimum(e2e_s, alone.e2e_s)
        for place, group in enumerate(self._groups):
            own = self._origins == place
            objective, rtt_s = _objective(group.objective), group.rtt_ms / 1e3
            meets = np.ones(int(own.sum()), dtype=bool)
            if objective.ttft_ms is not None:
                meets &= ttft_s[own] + rtt_s <= objective.ttft_ms / 1e3
            if objective.e2e_s is not None:
                meets &= e2e_s[own] + rtt_s <= objective.e2e_s
            if meets.sum() < objective.share * len(meets):
                return False
        return True


def _objective(objective: Objective | None) -> Objective:
    assert objective is not None, "the settings have given each group one"
    return objective


def _alone(demand: Demand, kind: Kind) -> LowerBound:
    # A spike or jitter only adds to the round trip.
    link = Link(rtt_s=kind.rtt_s, jitter=0.0, spike_probability=0.0)
    replica = SimReplica(ReplicaSpec(kind.name, kind.region), kind.profile, link)
    return lower_bound(demand.feed, SimFleet((replica,)), block_tokens=demand.block_tokens)


def _rates_of(profile: EngineProfile) -> Rates:
    batch = profile.max_running_requests
    best = max(size / profile.decode_s(size, 0) for size in range(1, batch + 1))
    one = Rates(profile.prefill_tokens_per_s, best, float(profile.kv_tokens))
    return Rates(*(profile.ranks * rate for rate in (one.prefill, one.decode, one.kv)))


def _needed(demand: Demand, kinds: Sequence[Kind]) -> Rates:
    """Return the least rates of a fleet that meets the objectives."""
    objectives = [_objective(group.objective) for group in demand.groups]
    counts = np.bincount(np.array(demand.origins), minlength=len(objectives))
    may_miss = int(sum((1 - one.share) * count for one, count in zip(objectives, counts, strict=True)))
    arrivals = np.array([request.arrival_s for request in demand.feed])
    output = np.array([request.output_tokens for request in demand.feed], dtype=float)
    prompt = np.array([request.prompt_tokens for request in demand.feed], dtype=float)
    found_share = max(kind.profile.hit_share if kind.profile.prefix_cache else 0.0 for kind in kinds)
    new = prompt - found_share * cached_tokens(demand.feed, demand.block_tokens)
    firsts = [one.first_token_s for one in objectives]
    ends = [one.e2e_s for one in objectives]
    found = Rates()
    if all(firsts):
        first_s = max(bound for bound in firsts if bound)
        found = replace(found, prefill=_most(arrivals, new, np.full(len(new), first_s), may_miss))
        step_s = min(kind.profile.decode_s(1, 0) for kind in kinds)
        holding_s = np.maximum(output - 1, 0) * step_s
        found = replace(found, kv=_most(arrivals, (new + output / 2) * holding_s, first_s + holding_s, may_miss))
    if all(ends):
        end_s = max(bound for bound in ends if bound)
        found = replace(found, decode=_most(arrivals, output, np.full(len(output), end_s), may_miss))
    return found


def _most(arrivals: Floats, work: Floats, until_s: Floats, may_miss: int) -> float:
    """Return the largest work per second that any window asks for.

    Parameters
    ----------
    arrivals:
        When each request arrives, ascending, s.
    work:
        What each asks for.
    until_s:
        How long after its arrival its work may take at most.
    may_miss:
        So many requests of a window may be left out, which are those with the most work.
    """
    most = 0.0
    for window_s in WINDOWS_S:
        step_s = window_s / 2
        for begin_s in np.arange(arrivals[0], arrivals[-1] + step_s, step_s):
            first, last = np.searchsorted(arrivals, (begin_s, begin_s + window_s))
            if last - first <= may_miss:
                continue
            own = work[first:last]
            left_out = np.partition(own, len(own) - may_miss)[len(own) - may_miss :].sum() if may_miss else 0.0
            most = max(most, (own.sum() - left_out) / (window_s + until_s[first:last].max()))
    return most
