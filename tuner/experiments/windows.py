"""The traffic of the experiments: ART-Chat-like windows, drawn by seed, one or several end to end.

Theory of operation: one window is half an hour, which holds seven pairs of a switchback's blocks at most. A longer run
is several windows of the same shape, each drawn with its own seed; the hashes of each are its own, so that no prompt of
one is found in a cache that another has filled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from gorgo.apps.datasets import load_requests
from gorgo.apps.simulate.feed import feed_of
from gorgo.apps.traces import TraceFilters
from gorgo.core.fleet.spec import ReplicaSpec
from gorgo.sim.engine.profiles import find_profile
from gorgo.sim.fleet import SimFleet, SimReplica
from gorgo.sim.network.links import Link
from gorgo.sim.workload import SimRequest

#: The paper drops longer prompts and caps answers; nearly all end at the cap.
MAX_INPUT, MAX_OUTPUT = 24_000, 128
#: Seeds of windows that follow one another in a run are this far apart: no two runs share one.
STRIDE = 1000
#: Between two windows, s: about the time between two requests.
PAUSE_S = 0.5
PROFILE = "2xL40S-Qwen3.5-35B-A3B-FP8-fitted"
#: The paper's three regions, seen from the first, s.
RTT_S = {"us-ashburn": 0.002, "eu-frankfurt": 0.095, "ap-seoul": 0.180}


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Windows end to end.

    Parameters
    ----------
    shapes:
        By name, in their order.
    draw:
        Seed of the first; the next ones' follow from it.
    time_scale:
        2.0 is half the load.
    limit:
        The first so many requests of each; None: all.
    """

    shapes: tuple[str, ...]
    draw: int
    time_scale: float = 1.0
    limit: int | None = None

    def feed(self) -> Sequence[SimRequest]:
        """Return the requests at time scale 1."""
        return _feed(self.shapes, self.draw, self.limit)


def paper_fleet() -> SimFleet:
    """The paper's fleet; the Router is told nothing of the engines' speed."""
    profile = find_profile(PROFILE)
    return SimFleet(
        tuple(
            SimReplica(
                ReplicaSpec(f"{region}-0", region, kv_capacity_tokens=profile.kv_tokens, max_running_requests=64),
                profile,
                Link(rtt_s=rtt_s),
            )
            for region, rtt_s in RTT_S.items()
        )
    )


def joined(feeds: Sequence[Sequence[SimRequest]]) -> Iterator[SimRequest]:
    """Yield the feeds one after the other; each has its own users and prompts."""
    offset_s, index = 0.0, 0
    for number, feed in enumerate(feeds):
        salt = np.uint64((number * 0x9E3779B97F4A7C15) % 2**64)
        for request in feed:
            blocks = np.frombuffer(request.blocks, dtype="<u8") ^ salt
            yield replace(
                request,
                index=index,
                arrival_s=offset_s + request.arrival_s,
                blocks=blocks.tobytes(),
                prefix_hash=request.prefix_hash ^ int(salt),
            )
            index += 1
        offset_s += feed[-1].arrival_s + PAUSE_S


@lru_cache(maxsize=3)
def _feed(shapes: tuple[str, ...], draw: int, limit: int | None) -> Sequence[SimRequest]:
    filters = TraceFilters(max_input=MAX_INPUT, max_output=MAX_OUTPUT, min_output=MAX_OUTPUT, limit=limit)
    feeds = [feed_of(load_requests(shape, filters, seed=draw + STRIDE * number)) for number, shape in enumerate(shapes)]
    return tuple(joined(feeds))
