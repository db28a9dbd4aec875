"""What simulator tests share: a fleet of three regions, feeds of users who come back, and profiles in round numbers."""

from __future__ import annotations

import numpy as np

from gorgo.core.fleet.replica import ReplicaSpec
from gorgo.lab.sim.engine.profiles import EngineProfile, find_profile
from gorgo.lab.sim.fleet import SimFleet, SimReplica, with_accurate_priors
from gorgo.lab.sim.network import Link
from gorgo.lab.sim.workload import SimRequest

# --- The fleet of most simulator tests: three regions, as regions.yaml has them.


REGIONS = {"us-ashburn": 0.002, "eu-frankfurt": 0.095, "ap-seoul": 0.180}


def three_regions(**regions_s: float) -> SimFleet:
    """One 2x L40S replica per region, `<region>-0`, the Router told the truth."""
    profile = find_profile("2xL40S-Qwen3.5-35B-A3B-FP8-estimate")
    replicas = [
        SimReplica(ReplicaSpec(f"{region}-0", region, accelerator=profile.accelerator), profile, Link(rtt_s=rtt_s))
        for region, rtt_s in (regions_s or REGIONS).items()
    ]
    return with_accurate_priors(SimFleet(tuple(replicas)))


# --- Feeds for simulator tests: users who come back with all that was said, and a little more.


def conversations(requests: int, *, every_s: float, seed: int = 0, users: int = 12) -> list[SimRequest]:
    rng = np.random.default_rng(seed)
    said = [b""] * users
    feed = []
    arrival_s = 0.0
    for index in range(requests):
        user = int(rng.integers(users))
        grown = said[user] + rng.bytes(8 * int(rng.integers(1, 9)))
        said[user] = grown if len(grown) <= 8 * 30 else grown[: 8 * 4]
        prompt_tokens = len(said[user]) // 8 * 512 + int(rng.integers(1, 512))
        feed.append(
            SimRequest(
                index=index,
                arrival_s=arrival_s,
                prompt_tokens=prompt_tokens,
                output_tokens=int(rng.integers(1, 120)),
                blocks=said[user],
                prefix_hash=user,
                session_id=f"user {user}",
                body_bytes=4 * prompt_tokens,
            )
        )
        arrival_s += float(rng.exponential(every_s))
    return feed


# --- Engine profiles for tests: round numbers, so that times can be computed by hand.


def round_profile(
    *,
    kv_tokens: int = 10_000,
    chunk_tokens: int = 100,
    max_running_requests: int = 8,
    context_tokens: int = 4_000,
    prefill_kappa_s: float = 0.0,
    decode_kv_s: float = 0.0,
    hit_share: float = 1.0,
    checkpoint_tokens: int = 1,
    cuda_graph_max_batch: int | None = None,
    decode_eager_s: float = 0.0,
    caches_output: bool = True,
) -> EngineProfile:
    """A prefill step takes 10 ms and 1 ms a token; a decode iteration 20 ms and 1 ms a request.

    Attention is free unless stated.
    """
    return EngineProfile(
        name="round",
        prefill_base_s=0.010,
        prefill_tokens_per_s=1000.0,
        prefill_kappa_s=prefill_kappa_s,
        chunk_tokens=chunk_tokens,
        decode_base_s=0.020,
        decode_per_request_s=0.001,
        decode_kv_s=decode_kv_s,
        kv_tokens=kv_tokens,
        max_running_requests=max_running_requests,
        context_tokens=context_tokens,
        hit_share=hit_share,
        checkpoint_tokens=checkpoint_tokens,
        cuda_graph_max_batch=cuda_graph_max_batch,
        decode_eager_s=decode_eager_s,
        caches_output=caches_output,
    )
