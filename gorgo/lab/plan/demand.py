"""The demand: what the clients of all regions ask for, as one feed of a simulation, and what it needs at least.

Owns the merge. Each region's clients replay a trace that is turned round by their shift, so that a day which begins
eight hours later ends eight hours into the next. Regions have prompts of their own: the same trace in two regions
shares nothing between them, which is the harder case for a fleet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from math import inf

import numpy as np

from gorgo.core.fleet.replica import ReplicaSpec
from gorgo.core.numeric import Floats
from gorgo.errors import TraceError
from gorgo.lab.datasets import load_requests, own_block_tokens
from gorgo.lab.plan.settings import ClientGroup, Kind, Objective
from gorgo.lab.sim.engine.profiles import EngineProfile
from gorgo.lab.sim.fleet import SimFleet, SimReplica
from gorgo.lab.sim.lower_bound import LowerBound, cached_tokens, lower_bound
from gorgo.lab.sim.network import Link
from gorgo.lab.sim.workload import SimRequest
from gorgo.lab.simulate.feed import feed_of
from gorgo.lab.traces import TraceFilters

_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Demand:
    """All requests in order of arrival.

    Parameters
    ----------
    feed:
        Their indices are their places.
    origins:
        Place of each request's clients among `groups`.
    groups:
        The clients of each region.
    span_s:
        Length of the traces.
    block_tokens:
        Tokens per block of a prompt's prefix.
    """

    feed: Sequence[SimRequest]
    origins: Sequence[int]
    groups: Sequence[ClientGroup]
    span_s: float
    block_tokens: int

    def of(self, group_index: int) -> Demand:
        """Return the demand of one region's clients alone."""
        requests = [request for request, origin in zip(self.feed, self.origins, strict=True) if origin == group_index]
        feed = tuple(replace(request, index=index) for index, request in enumerate(requests))
        return Demand(feed, [0] * len(feed), (self.groups[group_index],), self.span_s, self.block_tokens)


def read_demand(trace: str, groups: Sequence[ClientGroup], filters: TraceFilters, *, growth: float = 1.0) -> Demand:
    """Return the demand of all groups; `growth` is the load relative to the traces' own.

    Raises `TraceError` for a trace that cannot be read, or is empty, and for traces of unlike block sizes.
    """
    traces = [group.trace or trace for group in groups]
    sizes = {name: own_block_tokens(name) for name in traces}
    if len(set(sizes.values())) > 1:
        named = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        raise TraceError(f"{named} tokens in a block; expected traces with blocks of one size")
    block_tokens = sizes[traces[0]]
    feeds = [_feed(name, filters, block_tokens) for name in traces]
    span_s = max(feed[-1].arrival_s for feed in feeds)
    arrivals = [
        (moved, group_index)
        for group_index, (group, feed) in enumerate(zip(groups, feeds, strict=True))
        for moved in _turned(feed, group, group_index, span_s=span_s, growth=growth)
    ]
    arrivals.sort(key=lambda one: (one[0].arrival_s, one[1]))
    merged = tuple(replace(request, index=index) for index, (request, _) in enumerate(arrivals))
    return Demand(merged, [group_index for _, group_index in arrivals], tuple(groups), span_s / growth, block_tokens)


def _feed(trace: str, filters: TraceFilters, block_tokens: int) -> Sequence[SimRequest]:
    feed = feed_of(
        load_requests(trace, filters, seed=filters.seed, block_tokens=block_tokens), block_tokens=block_tokens
    )
    if not feed:
        raise TraceError(f"{trace}: no request is left; expected some to plan for")
    return feed


def _turned(
    feed: Sequence[SimRequest], group: ClientGroup, group_index: int, *, span_s: float, growth: float
) -> Iterator[SimRequest]:
    """Yield the requests of one region's clients: turned round, and with prefixes and sessions of their own."""
    salt, shift_s = _salt(group_index), group.shift_h * _HOUR_S
    for request in feed:
        # The longest trace ends at the span itself, which is not its beginning.
        arrival_s = request.arrival_s if not shift_s else (request.arrival_s + shift_s) % span_s
        yield replace(
            request,
            arrival_s=arrival_s / growth,
            blocks=salt(request.blocks),
            output_blocks=salt(request.output_blocks),
            prefix_hash=int.from_bytes(salt(request.prefix_hash.to_bytes(8, "little")), "little"),
            session_id=request.session_id and f"{group.region}/{request.session_id}",
        )


def _salt(group_index: int) -> Callable[[bytes], bytes]:
    """Return a map of hashes to others, one to one; that of the first place changes nothing."""
    if not group_index:
        return bytes
    mask = np.frombuffer(blake2b(group_index.to_bytes(4, "little"), digest_size=8).digest(), dtype="<u8")
    return lambda blocks: (np.frombuffer(blocks, dtype="<u8") ^ mask).tobytes()


# Lower bounds: fleets that cannot meet the objectives, whatever their router does, without a simulation.
#
# Theory of operation. Each bound is true of every schedule, so that no fleet which would do is left out. At most
# `1 - share` of a region's requests may miss; a bound leaves out that many of all requests, those that ask for most.
#
# - Distance. `lower_bound` says what each request takes alone on the best replica of the fleet, with everything seen
#   before in its cache. If too few meet their bounds even so, the kinds of the fleet are too far away or too slow.
# - Prefill. What arrives within a window of length w has to be prefilled until the objective S after its end. So the
#   fleet's prefill rates have to reach the window's tokens, less those that an earlier prompt had, over w + S.
# - Decode. With an objective of the whole answer E, the window's output tokens have to be there within w + E, and no
#   engine makes more of them than with its fullest batch.
# - KV pool. From its first token a request holds its own tokens until its last one, no shorter than it takes alone on
#   the fastest engine. The sum of tokens times seconds has to fit into the pools.
#
# The last three are one number each: the least that the replicas' rates have to add up to.


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
        is_near = self._near_enough.get(present)
        if is_near is None:
            is_near = self._near_enough[present] = self._meets_alone(present)
        return is_near

    def _meets_alone(self, present: tuple[bool, ...]) -> bool:
        ttft_s, e2e_s = np.full(len(self._origins), inf), np.full(len(self._origins), inf)
        for alone, is_there in zip(self._alone, present, strict=True):
            if is_there:
                ttft_s, e2e_s = np.minimum(ttft_s, alone.ttft_s), np.minimum(e2e_s, alone.e2e_s)
        for index, group in enumerate(self._groups):
            of_group = self._origins == index
            objective, rtt_s = _objective(group.objective), group.rtt_ms / 1e3
            meets = np.ones(int(of_group.sum()), dtype=bool)
            if objective.ttft_ms is not None:
                meets &= ttft_s[of_group] + rtt_s <= objective.ttft_ms / 1e3
            if objective.e2e_s is not None:
                meets &= e2e_s[of_group] + rtt_s <= objective.e2e_s
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
    rates = Rates()
    if all(firsts):
        first_s = max(bound for bound in firsts if bound)
        rates = replace(rates, prefill=_most(arrivals, new, np.full(len(new), first_s), may_miss))
        step_s = min(kind.profile.decode_s(1, 0) for kind in kinds)
        holding_s = np.maximum(output - 1, 0) * step_s
        rates = replace(rates, kv=_most(arrivals, (new + output / 2) * holding_s, first_s + holding_s, may_miss))
    if all(ends):
        end_s = max(bound for bound in ends if bound)
        rates = replace(rates, decode=_most(arrivals, output, np.full(len(output), end_s), may_miss))
    return rates


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
            window_work = work[first:last]
            left_out = (
                np.partition(window_work, len(window_work) - may_miss)[len(window_work) - may_miss :].sum()
                if may_miss
                else 0.0
            )
            most = max(most, (window_work.sum() - left_out) / (window_s + until_s[first:last].max()))
    return most
