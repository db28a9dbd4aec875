"""The fleet that a simulation runs: which engine each replica is and how far away, by name or from regions.yaml.

Owns the records, the table of named fleets (regions, round trips and engine profiles as data, for comparisons beyond
the fleet of regions.yaml), and the step from the configuration. What the Router is told of a replica (`spec`, with
priors that may be wrong) is apart from what it is (`profile`), so that an experiment can make the two differ. Of
regions.yaml, what an engine is comes from the `simulation` section, and what the router assumes of it from `replicas`,
as `gorgo serve` does. Of a named fleet's engines the Router has accurate priors; a scenario may change them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gorgo.config.model import Config, SimulationConfig
from gorgo.config.router_settings import replica_spec, router_limits
from gorgo.core.fleet.replica import ReplicaSpec
from gorgo.core.limits import RouterLimits
from gorgo.errors import ConfigError, UnknownFleet
from gorgo.lab.sim.engine.profiles import EngineProfile, as_vllm, find_profile, named_profile
from gorgo.lab.sim.network import Link
from gorgo.lab.sim.workload import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class SimReplica:
    """One simulated replica.

    Parameters
    ----------
    spec:
        What the Router knows: name, region, priors.
    profile:
        What the engine is.
    link:
        The way from the proxy to it.
    """

    spec: ReplicaSpec
    profile: EngineProfile
    link: Link

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def region(self) -> str:
        return self.spec.region


@dataclass(frozen=True, slots=True)
class SimFleet:
    """All replicas, in the order in which they join the Router's fleet; `name` is empty for that of regions.yaml."""

    replicas: Sequence[SimReplica]
    name: str = ""

    def changed(self, change: Callable[[SimReplica], SimReplica]) -> SimFleet:
        """Return the fleet of changed replicas."""
        return replace(self, replicas=tuple(map(change, self.replicas)))


def with_accurate_priors(fleet: SimFleet) -> SimFleet:
    """The same fleet, the Router told of each replica what its engine is: KV pool, batch, time of a prefill."""
    return fleet.changed(lambda replica: with_priors_of(replica, replica.profile))


def with_priors_of(replica: SimReplica, profile: EngineProfile, *, faster: float = 1.0) -> SimReplica:
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


#: Mean round trip to each region of the paper, ms, as in regions.yaml.
THREE_REGIONS: Mapping[str, float] = {"us-ashburn": 2.0, "eu-frankfurt": 95.0, "ap-seoul": 180.0}
#: The same replicas within one metropolitan network.
FAST_LINKS: Mapping[str, float] = {"us-ashburn": 1.0, "eu-frankfurt": 3.0, "ap-seoul": 6.0}
QWEN_L40S, QWEN_H100 = "2xL40S-Qwen3.5-35B-A3B-FP8-fitted", "1xH100-Qwen3.5-35B-A3B-FP8"
#: The region of pooled fleets, and the round trip within it.
ONE_REGION, POOLED_RTT_S = "local", 0.001
MIXED = ("1xA30-Llama-3.1-8B", "1xL40S-Llama-3.1-8B", "1xH100-Llama-3.1-8B")
#: Of the estimate for Qwen3-Coder-480B: a decode step has the fixed cost that the published 22 ms per token leave, a
#: prefill the speed at which first tokens are seconds late at the published rates. Assumed, as is the longest context.
AS_PUBLISHED = {"decode_base_s": 0.019, "prefill_tokens_per_s": 5000.0, "context_tokens": 140_000}
#: The same engine with the context to which its model is stretched, so that the longest prompts of agents fit. Assumed.
LONG_CONTEXT = {**AS_PUBLISHED, "context_tokens": 524_288}
#: The same GPUs and model as estimated: every cached prefix is found.
ESTIMATE = "2xL40S-Qwen3.5-35B-A3B-FP8-estimate"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedFleet:
    """One fleet of the table: one or more replicas per region, from `<region>-0` on.

    Parameters
    ----------
    description:
        Engines and links, in a line of `gorgo profiles`.
    profiles:
        Names of profiles, region by region; a single one is that of every region.
    changes:
        Fields of every profile that differ from it.
    rtt_ms:
        Mean round trip from the proxy to each region.
    per_region:
        Replicas in each region, all alike.
    vllm:
        Whether the engines are under vLLM's scheduler.
    """

    name: str
    description: str
    profiles: Sequence[str]
    changes: Mapping[str, Any] = field(default_factory=dict)
    rtt_ms: Mapping[str, float] = field(default_factory=lambda: THREE_REGIONS)
    per_region: int = 1
    vllm: bool = False

    def fleet(self) -> SimFleet:
        """Return the fleet with accurate priors; raises `UnknownProfile`."""
        return with_accurate_priors(SimFleet(tuple(self._replicas()), self.name))

    def _replicas(self) -> Iterator[SimReplica]:
        profiles = [self._profile(name) for name in self.profiles]
        each = profiles * len(self.rtt_ms) if len(profiles) == 1 else profiles
        for (region, rtt_ms), profile in zip(self.rtt_ms.items(), each, strict=True):
            for number in range(self.per_region):
                spec = ReplicaSpec(f"{region}-{number}", region, accelerator=profile.accelerator)
                yield SimReplica(spec, profile, Link(rtt_s=rtt_ms / 1e3))

    def _profile(self, name: str) -> EngineProfile:
        profile = find_profile(name)
        return replace(as_vllm(profile) if self.vllm else profile, **self.changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPool:
    """So many equal replicas, `<name>-0` and on, under vLLM's scheduler."""

    count: int
    name: str
    profile: str
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledFleet:
    """A fleet of pools in one data centre, as published comparisons of routers have them.

    Parameters
    ----------
    description:
        As in `NamedFleet`.
    pools:
        Of equal replicas each, all under `ONE_REGION`.
    """

    name: str
    description: str
    pools: Sequence[ReplicaPool]

    def fleet(self) -> SimFleet:
        """Return the fleet with accurate priors; raises `UnknownProfile`."""
        return with_accurate_priors(SimFleet(tuple(self._replicas()), self.name))

    def _replicas(self) -> Iterator[SimReplica]:
        for pool in self.pools:
            profile = replace(as_vllm(find_profile(pool.profile)), **pool.changes)
            for number in range(pool.count):
                spec = ReplicaSpec(f"{pool.name}-{number}", ONE_REGION, accelerator=profile.accelerator)
                yield SimReplica(spec, profile, Link(rtt_s=POOLED_RTT_S))


def _a30(count: int) -> ReplicaPool:
    return ReplicaPool(count=count, name="a30", profile="1xA30-Llama-3.1-8B")


_TABLE: tuple[NamedFleet | PooledFleet, ...] = (
    NamedFleet(name="paper", description="the paper's: 2x L40S in each of three regions, fitted", profiles=[QWEN_L40S]),
    NamedFleet(name="h100", description="the paper's for WildChat: one H100 in each region", profiles=[QWEN_H100]),
    NamedFleet(
        name="mixed-gpus", description="Llama-3.1-8B: A30 near, L40S in Frankfurt, H100 in Seoul", profiles=MIXED
    ),
    NamedFleet(name="mixed-gpus-x2", description="the same with two of each GPU", profiles=MIXED, per_region=2),
    NamedFleet(name="mixed-gpus-x3", description="the same with three of each GPU", profiles=MIXED, per_region=3),
    NamedFleet(
        name="small-model", description="Llama-3.2-1B on one A30 in each region", profiles=["1xA30-Llama-3.2-1B"]
    ),
    NamedFleet(
        name="dense-70b", description="Llama-3.1-70B on 4x H100 in each region", profiles=["4xH100-Llama-3.1-70B"]
    ),
    NamedFleet(
        name="dense-70b-x2",
        description="Llama-3.1-70B on two times 4x H100 in each region",
        profiles=["4xH100-Llama-3.1-70B"],
        per_region=2,
    ),
    NamedFleet(
        name="sglang", description="2x L40S each as estimated: every cached prefix is found", profiles=[ESTIMATE]
    ),
    NamedFleet(
        name="vllm",
        description="2x L40S each, under vLLM's scheduler with its defaults for such a GPU",
        profiles=["2xL40S-Qwen3.5-35B-A3B-FP8-vLLM"],
    ),
    NamedFleet(
        name="no-prefix-cache",
        description="2x L40S each, without a prefix cache",
        profiles=[QWEN_L40S],
        changes={"prefix_cache": False},
    ),
    NamedFleet(
        name="fast-links",
        description="2x L40S each, round trips of 1, 3 and 6 ms",
        profiles=[QWEN_L40S],
        rtt_ms=FAST_LINKS,
    ),
    PooledFleet(name="8xA30", description="Lodestar's equal GPUs: Llama-3.1-8B on 8 A30, vLLM", pools=[_a30(8)]),
    PooledFleet(
        name="7xA30-8xV100",
        description="Lodestar's mixed GPUs: 7 A30, and 8 V100 without a prefix cache",
        pools=[
            _a30(7),
            ReplicaPool(count=8, name="v100", profile="1xV100-Llama-3.1-8B", changes={"prefix_cache": False}),
        ],
    ),
    PooledFleet(
        name="7xL20-8xA30",
        description="Lodestar's mixed GPUs: Llama-3.1-8B on 7 L20 and 8 A30",
        pools=[ReplicaPool(count=7, name="l20", profile="1xL20-Llama-3.1-8B"), _a30(8)],
    ),
    PooledFleet(
        name="7xL20",
        description="Lodestar's figure 1: DeepSeek-7B on 7 L20",
        pools=[ReplicaPool(count=7, name="l20", profile="1xL20-DeepSeek-7B")],
    ),
    PooledFleet(
        name="10x2xH100",
        description="llm-d's scenarios: Qwen3-32B on 10 times 2 H100",
        pools=[ReplicaPool(count=10, name="h100", profile="2xH100-Qwen3-32B")],
    ),
    PooledFleet(
        name="8x1xH100",
        description="llm-d's ShareGPT: Llama-3.1-8B on 8 H100",
        pools=[ReplicaPool(count=8, name="h100", profile="1xH100-Llama-3.1-8B")],
    ),
    NamedFleet(
        name="6x1xH100",
        description="Llama-3.1-8B on two H100 in each region, vLLM",
        profiles=["1xH100-Llama-3.1-8B"],
        per_region=2,
        vllm=True,
    ),
    PooledFleet(
        name="13x8xH200",
        description="llm-d's production traffic: Qwen3-Coder-480B on 13 times 8 H200",
        pools=[ReplicaPool(count=13, name="h200", profile="8xH200-Qwen3-Coder-480B-A35B-FP8", changes=AS_PUBLISHED)],
    ),
    PooledFleet(
        name="8x8xH200",
        description="for agents' long prompts: Qwen3-Coder-480B with 512k tokens of context on 8 times 8 H200",
        pools=[ReplicaPool(count=8, name="h200", profile="8xH200-Qwen3-Coder-480B-A35B-FP8", changes=LONG_CONTEXT)],
    ),
)

#: Every named fleet, in the order of the table.
FLEETS: Mapping[str, NamedFleet | PooledFleet] = MappingProxyType({fleet.name: fleet for fleet in _TABLE})


def find_fleet(name: str) -> SimFleet:
    """Return the fleet of that name; raises `UnknownFleet`, which lists the names there are.

    Example
    -------
    >>> [replica.name for replica in find_fleet("h100").replicas]
    ['us-ashburn-0', 'eu-frankfurt-0', 'ap-seoul-0']
    """
    try:
        return FLEETS[name].fleet()
    except KeyError:
        raise UnknownFleet(f"no fleet named {name!r}; there are: {', '.join(FLEETS)}") from None


def fleet_of(config: Config, *, source: Path) -> SimFleet:
    """Every replica that is not draining, on its profile of the `simulation` section.

    Models are left out: a trace asks for none. Raises `ConfigError` for a region without a round trip and
    `UnknownProfile`.
    """
    simulation = config.simulation
    replicas = []
    for replica in config.replicas:
        if replica.draining:
            continue
        rtt_ms = simulation.rtt_ms.get(replica.region)
        if rtt_ms is None:
            key = f"simulation.rtt_ms.{replica.region}"
            raise ConfigError(f"{source}: {key}: missing; expected the mean round trip to that region in ms")
        spec = replace(replica_spec(replica), models=())
        profile = profile_of(simulation, replica.name)
        replicas.append(SimReplica(spec, profile, Link(rtt_s=rtt_ms / 1e3)))
    if not replicas:
        lack = "all are draining" if config.replicas else "none"
        raise ConfigError(f"{source}: replicas: {lack}; expected one to simulate")
    return SimFleet(tuple(replicas))


def chosen_fleet(config: Config, name: str | None, *, source: Path) -> SimFleet:
    """Return the named fleet, or without a name that of the configuration; raises `UnknownFleet`."""
    return fleet_of(config, source=source) if name is None else find_fleet(name)


def profile_of(simulation: SimulationConfig, replica: str) -> EngineProfile:
    """Return the engine profile of a replica, by name or from a file. Raises `UnknownProfile` and `ConfigError`."""
    name = simulation.profiles.get(replica, simulation.profile)
    return named_profile(name)


def limits_of(config: Config) -> RouterLimits:
    """The Router's bounds as `gorgo serve` sets them, with blocks of a trace's size."""
    return replace(router_limits(config), block_tokens=float(BLOCK_TOKENS))


def with_queue_for_all(limits: RouterLimits, *, enabled: bool) -> RouterLimits:
    """Return the limits with the queue of the proxy under every policy, or under none."""
    overload = replace(limits.overload, queue_enabled=enabled, queue_every_policy=enabled)
    return replace(limits, overload=overload)
