"""Fleets of the runs: a named one, or so many equal replicas, with a part of their KV pools; and the paper's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any

from gorgo.core.fleet.replica import ReplicaSpec
from gorgo.lab.sim.engine.profiles import EngineProfile, as_vllm, find_profile
from gorgo.lab.sim.fleet import (
    ONE_REGION,
    POOLED_RTT_S,
    THREE_REGIONS,
    SimFleet,
    SimReplica,
    find_fleet,
    with_accurate_priors,
)
from gorgo.lab.sim.network import Link

#: Llama-2-13B on an A100 of 80 GB, derived as the estimates of `gorgo.lab.sim.engine.profiles` are: 162 TFLOPS of 25.4
#: GFLOP a token, 819 kFLOP a pair at 120 TFLOPS, 26 GB of weights at 1.63 TB/s, 819,200 bytes of KV a token.
LLAMA_13B = EngineProfile(
    name="1xA100-Llama-2-13B", prefill_base_s=0.005, prefill_tokens_per_s=6400.0, prefill_kappa_s=6.8e-9,
    chunk_tokens=4096, decode_base_s=0.0159, decode_per_request_s=4.4e-5, decode_kv_s=5.0e-7, kv_tokens=61_000,
    max_running_requests=64, source="Estimate, not measured. Data sheet: 312 TFLOPS, 2039 GB/s, 80 GiB; shares of Ada.",
)  # fmt: skip
_PARTS = {1.0: "", 0.25: ", 1/4 of each pool", 1 / 16: ", 1/16 of each pool"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentFleet:
    """A fleet with accurate priors."""

    name: str
    profile: str | None = None  #: Name of the engine profile of every replica; None: `name` is a named fleet.
    replicas: int = 0  #: Of a named fleet 0 is its own number, and another one repeats its replicas in turn.
    vllm: bool = False  #: Whether the engines are of vLLM's kind; those of a named fleet are as it has them.
    pool_share: float = 1.0  #: Part of each KV pool that there is.

    @property
    def title(self) -> str:
        return self.name + _PARTS[self.pool_share]

    def sim_fleet(self) -> SimFleet:
        found = [
            replace(one, profile=replace(one.profile, kv_tokens=int(one.profile.kv_tokens * self.pool_share)))
            for one in (self._named() if self.profile is None else self._equal(self.profile))
        ]
        return with_accurate_priors(SimFleet(tuple(found), self.name))

    def _named(self) -> list[SimReplica]:
        replicas = list(find_fleet(self.name).replicas)
        numbered = enumerate(islice(cycle(replicas), self.replicas))
        repeated = [replace(one, spec=replace(one.spec, name=f"{one.region}-{n}")) for n, one in numbered]
        return repeated or replicas

    def _equal(self, name: str) -> list[SimReplica]:
        profile = LLAMA_13B if name == LLAMA_13B.name else find_profile(name)
        profile = as_vllm(profile) if self.vllm else profile
        named = (f"replica-{number}" for number in range(self.replicas))
        specs = [ReplicaSpec(name, ONE_REGION, accelerator=profile.accelerator) for name in named]
        return [SimReplica(spec, profile, Link(rtt_s=POOLED_RTT_S)) for spec in specs]


def paper_fleet(profile: EngineProfile) -> SimFleet:
    """Return the GORGO paper's fleet: a replica of that profile in each region, with accurate priors."""
    return with_accurate_priors(_three_regions(profile))


def unknown_paper_fleet(profile: EngineProfile) -> SimFleet:
    """Return the same; the Router knows pools and slots, and nothing of the engines' speed."""
    return _three_regions(profile, kv_capacity_tokens=profile.kv_tokens, max_running_requests=64)


def _three_regions(profile: EngineProfile, **spec: Any) -> SimFleet:
    spec = {"accelerator": profile.accelerator, **spec}
    return SimFleet(
        tuple(
            SimReplica(ReplicaSpec(f"{region}-0", region, **spec), profile, Link(rtt_s=rtt_ms / 1e3))
            for region, rtt_ms in THREE_REGIONS.items()
        )
    )
