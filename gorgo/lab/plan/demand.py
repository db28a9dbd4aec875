"""The demand: what the clients of all regions ask for, as one feed of a simulation.

Owns the merge. Each region's clients replay a trace that is turned round by their shift, so that a day which begins
eight hours later ends eight hours into the next. Regions have prompts of their own: the same trace in two regions
shares nothing between them, which is the harder case for a fleet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np

from gorgo.errors import TraceError
from gorgo.lab.datasets import load_requests, own_block_tokens
from gorgo.lab.plan.settings import ClientGroup
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

    def of(self, place: int) -> Demand:
        """Return the demand of one region's clients alone."""
        own = [request for request, origin in zip(self.feed, self.origins, strict=True) if origin == place]
        feed = tuple(replace(request, index=index) for index, request in enumerate(own))
        return Demand(feed, [0] * len(feed), (self.groups[place],), self.span_s, self.block_tokens)


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
        (moved, place)
        for place, (group, feed) in enumerate(zip(groups, feeds, strict=True))
        for moved in _turned(feed, group, place, span_s=span_s, growth=growth)
    ]
    arrivals.sort(key=lambda one: (one[0].arrival_s, one[1]))
    merged = tuple(replace(request, index=index) for index, (request, _) in enumerate(arrivals))
    return Demand(merged, [place for _, place in arrivals], tuple(groups), span_s / growth, block_tokens)


def _feed(trace: str, filters: TraceFilters, block_tokens: int) -> Sequence[SimRequest]:
    feed = feed_of(
        load_requests(trace, filters, seed=filters.seed, block_tokens=block_tokens), block_tokens=block_tokens
    )
    if not feed:
        raise TraceError(f"{trace}: no request is left; expected some to plan for")
    return feed


def _turned(
    feed: Sequence[SimRequest], group: ClientGroup, place: int, *, span_s: float, growth: float
) -> Iterator[SimRequest]:
    """Yield the requests of one region's clients: turned round, and with prefixes and sessions of their own."""
    salt, shift_s = _salt(place), group.shift_h * _HOUR_S
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


def _salt(place: int) -> Callable[[bytes], bytes]:
    """Return a map of hashes to others, one to one; that of the first place changes nothing."""
    if not place:
        return bytes
    mask = np.frombuffer(blake2b(place.to_bytes(4, "little"), digest_size=8).digest(), dtype="<u8")
    return lambda blocks: (np.frombuffer(blocks, dtype="<u8") ^ mask).tobytes()
