"""The floor: what each request would take if it were alone in the topology and everything seen so far were cached.

Owns the lowest of the three baselines: no router can be below it. It is no target: there is no load. The nearest idle
replica that has every earlier prompt costs

    TTFT = round trips for the body on a warm, wide open connection + prefill of the tokens never seen before
    E2E  = TTFT + the rest of the output, decoded alone

Each term is a least: jitter, spikes and faults only add to a mean trip, a shared step takes longer than one's own, and
a prompt that is prefilled elsewhere after this one arrived is there no sooner than this one's own would be. In a mixed
fleet every request has the replica that is best for it, for either figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gorgo.core.latency.ttft import round_trips
from gorgo.core.numeric import Floats
from gorgo.core.prefix.residency import BLOCK_HASH_BYTES
from gorgo.lab.sim.engine.prediction import PrefixSet
from gorgo.lab.sim.engine.profiles import EngineProfile
from gorgo.lab.sim.fleet import SimFleet
from gorgo.lab.sim.network import OPEN_WINDOWS
from gorgo.lab.sim.topology import Topology
from gorgo.lab.sim.workload import BLOCK_TOKENS, SimRequest


@dataclass(frozen=True, slots=True)
class LowerBound:
    """Per request, in the feed's order, s."""

    ttft_s: Floats
    e2e_s: Floats


def lower_bound(
    feed: Sequence[SimRequest],
    fleet: SimFleet,
    *,
    block_tokens: int = BLOCK_TOKENS,
    topology: Topology | None = None,
    seed: int = 0,
) -> LowerBound:
    """The floor of every request of `feed`, whose blocks have so many tokens, with the way to its router of `topology`.

    Example
    -------
    >>> from gorgo.core.fleet.replica import ReplicaSpec
    >>> from gorgo.lab.sim.network import Link
    >>> from gorgo.lab.sim.engine.profiles import find_profile
    >>> from gorgo.lab.sim.fleet import SimFleet, SimReplica
    >>> profile = find_profile("2xL40S-Qwen3.5-35B-A3B-FP8-estimate")
    >>> near = SimReplica(ReplicaSpec("near", "us"), profile, Link(rtt_s=0.002))
    >>> blocks = b"one.....two....."
    >>> twice = [
    ...     SimRequest(index=n, arrival_s=n, prompt_tokens=1025, output_tokens=2, blocks=blocks, prefix_hash=0)
    ...     for n in (0, 1)
    ... ]
    >>> floor = lower_bound(twice, SimFleet((near,)))
    >>> floor.ttft_s.round(4).tolist(), (floor.e2e_s - floor.ttft_s).round(4).tolist()
    ([0.104, 0.0141], [0.0083, 0.0083])
    """
    prompt = np.array([request.prompt_tokens for request in feed], dtype=np.float64)
    output = np.array([request.output_tokens for request in feed], dtype=np.float64)
    cached = cached_tokens(feed, block_tokens)
    has_windows = fleet.replicas[0].link.tcp_windows
    trips = np.array(
        [round_trips(request.body_bytes, OPEN_WINDOWS)[0] if has_windows else 1 for request in feed], dtype=np.float64
    )
    rtts_s: Sequence[float | Floats] = [replica.link.rtt_s for replica in fleet.replicas]
    if topology is not None:
        own_s, to_replicas_s = topology.mean_rtts_s(feed, fleet, seed=seed)
        rtts_s = [own_s + rtt_s for rtt_s in to_replicas_s]
    ttft_s, e2e_s = np.full(len(feed), np.inf), np.full(len(feed), np.inf)
    for replica, rtt_s in zip(fleet.replicas, rtts_s, strict=True):
        first_s = rtt_s * trips + prefill_s(replica.profile, prompt - cached, cached)
        np.minimum(ttft_s, first_s, out=ttft_s)
        np.minimum(e2e_s, first_s + _decode_s(replica.profile, prompt, output), out=e2e_s)
    return LowerBound(ttft_s, e2e_s)


def cached_tokens(feed: Sequence[SimRequest], block_tokens: int) -> Floats:
    """Return the tokens of each prompt that an earlier one or its answer had; at least one is always computed."""
    prefixes = PrefixSet(item_bytes=BLOCK_HASH_BYTES)
    cached = np.empty(len(feed))
    for row in np.argsort([request.arrival_s for request in feed], kind="stable"):
        request = feed[row]
        at_most = (request.prompt_tokens - 1) // block_tokens
        cached[row] = min(prefixes.items(request.blocks), at_most) * block_tokens
        prefixes.add(request.blocks + request.output_blocks)
    return cached


def prefill_s(profile: EngineProfile, new_tokens: Floats, cached_tokens: Floats) -> Floats:
    """Alone, in as many chunks as it takes."""
    return (
        np.ceil(new_tokens / profile.chunk_tokens) * profile.prefill_base_s
        + new_tokens / profile.prefill_tokens_per_s
        + profile.prefill_kappa_s * new_tokens * (cached_tokens + new_tokens / 2)
    )


def _decode_s(profile: EngineProfile, prompt_tokens: Floats, output_tokens: Floats) -> Floats:
    """All tokens but the first, alone: iteration k attends to the prompt and k tokens more."""
    iterations = output_tokens - 1
    context_tokens = prompt_tokens * iterations + iterations * (iterations + 1) / 2
    return iterations * profile.decode_s(1, 0) + profile.decode_kv_s * context_tokens
