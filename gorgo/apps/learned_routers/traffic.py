"""Traffic of a run: shapes at a rate, one after the other, so that load, sharing or lengths change at a request.

Owns the conversion to a feed. A shape is drawn at the rate wanted, cut to so many requests, and stretched to the rate
exactly, so that runs of two seeds have the same mean load.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import merge

import numpy as np

from gorgo.apps.datasets.catalogue import generate_requests
from gorgo.apps.datasets.prefix_shapes import GroupsShape, SharingShape
from gorgo.apps.simulate.feed import feed_of
from gorgo.apps.traces import TraceFilters, load_trace
from gorgo.errors import TraceError
from gorgo.sim.workload import BLOCK_TOKENS, SimRequest

#: Requests drawn for one that is used: those with prompts beyond the bound are dropped.
DRAWN_PER_REQUEST = 1.6
#: Requests of different phases and streams share nothing: their blocks differ in these bits.
_STREAM_BITS = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """So many requests at a mean rate, or in steps of equal time.

    Parameters
    ----------
    streams:
        Shapes side by side, each with an equal part of the requests; a string is the file of a trace.
    rates_per_s:
        One rate, or the rates of the steps; the texts of one step return in the next.
    """

    streams: tuple[SharingShape | GroupsShape | str, ...]
    requests: int
    rates_per_s: tuple[float, ...]

    @property
    def step_s(self) -> float:
        return self.requests / sum(self.rates_per_s)

    @property
    def duration_s(self) -> float:
        return self.step_s * len(self.rates_per_s)

    def arrival_s(self, share: float) -> float:
        """Return when so large a share of the requests has come."""
        whole = sum(self.rates_per_s)
        come, now_s = share * whole, 0.0
        for rate in self.rates_per_s[:-1]:
            if come <= rate:
                return now_s + self.step_s * come / rate
            come, now_s = come - rate, now_s + self.step_s
        return now_s + self.step_s * come / self.rates_per_s[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Phases one after the other.

    Parameters
    ----------
    name:
        Shown in tables, with the rate.
    max_input:
        Longer prompts are dropped.
    output_tokens:
        Of every answer; None: as drawn. 1 is prefill only.
    block_tokens:
        Of a prompt's prefix; 512 where a stream is a file.
    with_outputs:
        Whether a next turn begins with the answer that the engine generated.

    Example
    -------
    >>> from gorgo.apps.learned_routers.workloads import sharing
    >>> feed = feed_of_traffic(sharing(0.5, requests=200, rate_per_s=10.0), seed=1)
    >>> len(feed), round(feed[-1].arrival_s)
    (200, 20)
    """

    name: str
    phases: tuple[Phase, ...]
    max_input: int = 24_000
    output_tokens: int | None = None
    block_tokens: int = 64
    with_outputs: bool = False

    @property
    def requests(self) -> int:
        return sum(phase.requests for phase in self.phases)

    @property
    def label(self) -> str:
        """Return the name with the rates."""
        rates = dict.fromkeys(f"{rate:g}" for phase in self.phases for rate in phase.rates_per_s)
        return f"{self.name}, {' to '.join(rates)}/s"

    def scaled(self, factor: float) -> Traffic:
        """Return the same with so many times the requests in each phase, at least 10."""
        if factor == 1:
            return self
        phases = [replace(phase, requests=max(10, round(phase.requests * factor))) for phase in self.phases]
        return replace(self, phases=tuple(phases))


@lru_cache(maxsize=2)
def feed_of_traffic(traffic: Traffic, seed: int) -> Sequence[SimRequest]:
    """Return the requests in the order of time; raises `TraceError` where a trace is too short."""
    found: list[SimRequest] = []
    begins_s = 0.0
    for number, phase in enumerate(traffic.phases):
        streams = [
            _stream(traffic, phase, stream, seed, mark=(number * len(phase.streams) + place) << _STREAM_BITS)
            for place, stream in enumerate(phase.streams)
        ]
        merged = merge(*streams, key=lambda request: request.arrival_s)
        found += [replace(request, arrival_s=request.arrival_s + begins_s) for request in merged]
        begins_s += phase.duration_s
    return tuple(replace(request, index=index) for index, request in enumerate(found))


def _stream(
    traffic: Traffic, phase: Phase, stream: SharingShape | GroupsShape | str, seed: int, *, mark: int
) -> Iterator[SimRequest]:
    """Yield the stream's part of a phase, which begins at 0."""
    count = phase.requests // len(phase.streams)
    filters = TraceFilters(max_input=traffic.max_input, limit=count)
    if isinstance(stream, str):
        requests = load_trace(stream, filters)
        block_tokens = BLOCK_TOKENS
    else:
        rate_per_s = phase.requests / phase.duration_s / len(phase.streams)
        shape = _drawn(stream, count, rate_per_s, seed + (mark >> _STREAM_BITS) * 1000)
        block_tokens = traffic.block_tokens
        requests = filters.apply(generate_requests(shape, block_tokens=block_tokens))
    if len(requests) < count:
        raise TraceError(f"{traffic.name}: {len(requests)} requests pass the filters; expected {count}")
    feed = feed_of(requests, block_tokens=block_tokens, with_outputs=traffic.with_outputs)
    last_s = max(feed[-1].arrival_s, 1e-9)
    for request in feed:
        yield replace(
            request,
            arrival_s=phase.arrival_s(request.arrival_s / last_s),
            output_tokens=request.output_tokens if traffic.output_tokens is None else traffic.output_tokens,
            blocks=_marked(request.blocks, mark),
            output_blocks=_marked(request.output_blocks, mark),
            prefix_hash=request.prefix_hash ^ mark,
        )


def _drawn(shape: SharingShape | GroupsShape, count: int, rate_per_s: float, seed: int) -> SharingShape | GroupsShape:
    drawn = round(count * DRAWN_PER_REQUEST) + 10
    if isinstance(shape, GroupsShape):
        return replace(shape, seed=seed, rate_per_s=rate_per_s, duration_s=drawn / rate_per_s)
    return replace(shape, seed=seed, rate_per_s=rate_per_s, requests=drawn)


def _marked(blocks: bytes, mark: int) -> bytes:
    return (np.frombuffer(blocks, dtype="<u8") ^ np.uint64(mark)).tobytes() if mark and blocks else blocks
