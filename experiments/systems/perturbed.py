"""Settings that nobody tuned on: fleets, round trips, speeds, pools and traffic are drawn from a seed.

Theory of operation. Setting n is drawn by the generator of seed n and is the same for ever. Each kind of traffic has
three settings: lengths and counts are multiplied by random factors, and shares are raised to random powers. A fleet has
one model on one to three kinds of engine. Its speeds are those of no profile, and the Router is told those of the
profile: it knows pools and batches, and has to learn speeds. The load is the share of their time for which the engines
would be busy if every earlier prefix were found. It is drawn too, and the time scale follows from it.

No request is queued at the router, under any policy. The best of the rivals is chosen afterwards, for each setting and
figure, which no operator can do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

import numpy as np

from experiments.reports import Grid, SystemReport, target_report
from experiments.runner import Runner
from experiments.systems.herd import AGENTS, HERD
from experiments.windows import RatioTarget, Workload, drawn, targets_of
from gorgo.core.fleet.replica import ReplicaSpec
from gorgo.lab.datasets import Shape, read_shape, shapes
from gorgo.lab.sim.engine.profiles import EngineProfile, as_vllm, find_profile
from gorgo.lab.sim.fleet import SimFleet, SimReplica, with_accurate_priors
from gorgo.lab.sim.lower_bound import cached_tokens, prefill_s
from gorgo.lab.sim.network import Link
from gorgo.lab.sim.workload import SimRequest
from gorgo.lab.traces import TraceFilters
from gorgo.policies.registry import OURS, PAPER

NAME, TITLE = "perturbed", "settings that nobody tuned on"
TITLES: Mapping[str, str] = {
    "perturbed": "Settings drawn from a seed: against the best of seven rivals, chosen for each row",
    "perturbed-rivals": "The same against each rival, geometric means over the settings",
}
GROUPS = tuple(TITLES)
SETTINGS = 24
RIVALS = (
    PAPER, "least-request-in-flight", "prefix-cache-in-flight", "prefix-cache-and-load", "mooncake", "lmetric",
    "dualmap",
)  # fmt: skip
#: At most so far behind the best of the rivals, and behind each of them over all settings.
OF_BEST, OF_EACH = 1.05, 1.0
STATS = ("mean TTFT", "p95 TTFT", "p95 E2E")
#: Kinds of engine of one model each. The fleet of regions.yaml is left out: weights were chosen on it.
ENGINES: Sequence[Sequence[str]] = (
    ("1xA30-Llama-3.1-8B", "1xL20-Llama-3.1-8B", "1xL40S-Llama-3.1-8B", "1xH100-Llama-3.1-8B", "1xV100-Llama-3.1-8B"),
    ("1xH100-Qwen3-30B-A3B", "1xL40S-Qwen3-30B-A3B"),
    ("4xH100-Llama-3.1-70B", "2xH200-Llama-3.1-70B"),
)
#: Names of shapes; beside them the traffic of `herd` and `agents`.
SHAPES = ("art-chat-apr6", "toolagent-like", "rag", "sharing", "synthetic-like", "wildchat-like")
#: Prompt and answer fit into every context and pool.
FILTERS = TraceFilters(max_input=30_000, max_output=1024, limit=1_500)
POOL_TOKENS_MIN = 40_000
#: Factors lie within this of 1, in either direction, and so do the powers of shares.
FACTOR = 1.6
_DECODE_TIMES = ("decode_base_s", "decode_moe_s", "decode_per_request_s", "decode_kv_s")
#: Requests of a batch by which the time of a decoded token is counted.
BATCH = 32
#: What a factor changes in a shape, by the end of its name.
_LENGTHS = ("_median", "_tokens", "_mean", "_s_min")
_COUNTS = ("users", "groups", "applications", "documents", "sessions", "reuse_distance")


@lru_cache(maxsize=SETTINGS)
def setting(number: int) -> Workload:
    """Return a setting, its load in the time scale.

    Example
    -------
    >>> setting(3).name
    '3: sharing, 5 engines in 3 regions, 4 to 211 ms'
    """
    rng = np.random.default_rng(number)
    kinds: Mapping[str, Shape] = {
        **{name: read_shape(shapes()[name]) for name in SHAPES}, "herd": HERD, "agents": AGENTS,
    }  # fmt: skip
    kind = list(kinds)[number % len(kinds)]
    shape = perturbed_shape(kinds[kind], rng)
    fleet = perturbed_fleet(rng)
    load = rng.uniform(0.3, 0.9)
    feed = drawn(shape, 0, FILTERS)
    rtts_ms = sorted(1e3 * one.link.rtt_s for one in fleet.replicas)
    regions = len({one.region for one in fleet.replicas})
    where = f"{len(fleet.replicas)} engines in {regions} region{'s' if regions > 1 else ''}"
    time_scale = busy_s(feed, fleet, shape.block_tokens) / load / (feed[-1].arrival_s - feed[0].arrival_s)
    name = f"{number}: {kind}, {where}, {rtts_ms[0]:.0f} to {rtts_ms[-1]:.0f} ms"
    return Workload(name=name, traces=(kind,), shape=shape, filters=FILTERS, time_scale=time_scale, world=fleet)


def _factor(rng: np.random.Generator, most: float = FACTOR) -> float:
    return float(most ** rng.uniform(-1.0, 1.0))


def perturbed_shape(shape: Shape, rng: np.random.Generator) -> Shape:
    """Return the shape with other lengths, counts and shares; how long it lasts stays."""
    changes: dict[str, Any] = {}
    for one in fields(shape):
        value, factor = getattr(shape, one.name), _factor(rng)
        if one.name == "input_quantiles":
            changes[one.name] = tuple((share, min(tokens * factor, FILTERS.max_input or 0)) for share, tokens in value)
        elif one.name.endswith("_share"):
            changes[one.name] = value**factor
        elif one.name.endswith(_LENGTHS) or one.name in _COUNTS:
            least = 1 if value >= 1 else 0
            changes[one.name] = max(least, round(value * factor) if isinstance(value, int) else value * factor)
    return replace(shape, **changes)


def perturbed_fleet(rng: np.random.Generator) -> SimFleet:
    """Return a fleet; its Router knows each pool and batch, and of each speed that of the profile."""
    region_rtts_s = [1e-3 * rng.uniform(1, 8), *(1e-3 * 250 ** rng.uniform(0.3, 1, size=rng.integers(0, 4)))]
    names = rng.permutation(ENGINES[int(rng.integers(len(ENGINES)))])[: rng.integers(1, 4)]
    change: Callable[[EngineProfile], EngineProfile] = as_vllm if rng.uniform() < 0.5 else replace
    known = [_with_pool(change(find_profile(str(name))), rng) for name in names]
    speeds = [(_factor(rng), _factor(rng)) for _ in known]
    replicas = []
    for number in range(len(region_rtts_s) + int(rng.integers(2, 9))):
        region = number % len(region_rtts_s)
        kind = int(rng.integers(len(known)))
        spec = ReplicaSpec(f"replica-{number}", f"region-{region}", accelerator=known[kind].accelerator)
        replicas.append((SimReplica(spec, known[kind], Link(rtt_s=float(region_rtts_s[region]))), speeds[kind]))
    fleet = with_accurate_priors(SimFleet(tuple(one for one, _ in replicas)))
    real = [
        replace(one, profile=_faster(one.profile, prefill * _factor(rng, 1.1), decode * _factor(rng, 1.1)))
        for one, (_, (prefill, decode)) in zip(fleet.replicas, replicas, strict=True)
    ]
    return replace(fleet, replicas=tuple(real))


def _with_pool(profile: EngineProfile, rng: np.random.Generator) -> EngineProfile:
    """Return the engine with a pool between the least one and its own."""
    share = rng.uniform()
    return replace(profile, kv_tokens=int(POOL_TOKENS_MIN ** (1 - share) * profile.kv_tokens**share))


def _faster(profile: EngineProfile, prefill: float, decode: float) -> EngineProfile:
    times = {"prefill_base_s": prefill, "prefill_kappa_s": prefill} | dict.fromkeys(_DECODE_TIMES, decode)
    slower = {name: getattr(profile, name) / factor for name, factor in times.items()}
    return replace(profile, prefill_tokens_per_s=profile.prefill_tokens_per_s * prefill, **slower)


def busy_s(feed: Sequence[SimRequest], fleet: SimFleet, block_tokens: int) -> float:
    """Return how long all engines together are busy with the requests if every earlier prefix is found."""
    prompt = np.array([one.prompt_tokens for one in feed], dtype=np.float64)
    output = np.array([one.output_tokens for one in feed], dtype=np.float64)
    cached = cached_tokens(feed, block_tokens)
    rate = 0.0
    for replica in fleet.replicas:
        decode_s = replica.profile.decode_s(BATCH, BATCH * int(prompt.mean())) / BATCH
        rate += 1 / float((prefill_s(replica.profile, prompt - cached, cached) + output * decode_s).sum())
    return 1 / rate


def report(groups: Sequence[str], grid: Grid, runner: Runner) -> SystemReport:
    """Return a target per setting and figure, then one per rival and figure over all settings."""
    workloads = [setting(number) for number in range(SETTINGS)]
    targets = [
        *targets_of("perturbed", workloads, RIVALS, *((figure, OF_BEST) for figure in STATS)),
        *(RatioTarget("perturbed-rivals", OURS, workloads, (rival,), figure, OF_EACH)
          for figure in STATS for rival in RIVALS),
    ]  # fmt: skip
    return target_report(targets, groups, grid, runner, TITLES)
