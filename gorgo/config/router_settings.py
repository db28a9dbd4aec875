"""regions.yaml to the settings of a process: bounds, replicas and quotas of the Router, deadlines, buffered bytes.

Owns the translation. Leaves reading and checking the file to `load`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from gorgo.config.fleet import ReplicaConfig
from gorgo.config.model import Config, LearningConfig, LimitsConfig, OverloadConfig, ScalingConfig
from gorgo.config.values import STALE_INTERVALS
from gorgo.core.fleet.replica import ReplicaSpec
from gorgo.core.limits import ClientLimits, ClientRules, HedgeLimits, OverloadLimits, RouterLimits
from gorgo.core.policy.interface import USUAL_SCRAPE_S
from gorgo.core.scaling import ScalingLimits
from gorgo.core.training.learning import TrainingSpec

#: Hedges in five minutes however few requests there were: as many as one hung replica has of them at little traffic.
HEDGES_AT_LEAST = 10


def router_limits(config: Config) -> RouterLimits:
    """Return the Router's bounds; those that the file cannot set keep their defaults."""
    proxy = config.proxy
    return RouterLimits(
        max_attempts=config.limits.max_attempts,
        continuations=config.limits.continuations,
        max_in_flight=config.limits.max_in_flight,
        explore=proxy.explore / 1000,
        sampled_replicas=config.limits.sampled_replicas,
        stale_after_s=STALE_INTERVALS * max(proxy.probe_interval_s, proxy.scrape_interval_s or USUAL_SCRAPE_S),
        max_index_blocks=config.limits.prefix_index_blocks,
        overload=_overload_limits(config.overload),
        hedging=HedgeLimits(budget_ratio=config.overload.hedge_budget_ratio, budget_minimum=HEDGES_AT_LEAST),
        retry_budget_ratio=config.overload.retry_budget_ratio,
        slow_start_s=config.overload.slow_start_s,
        region_window_s=proxy.probe_interval_s,
        clients=client_rules(config),
        max_routes=proxy.multi_depth.max_routes,
        route_ttl_s=proxy.multi_depth.ttl_s,
    )


def training_spec(spec: TrainingSpec, learning: LearningConfig) -> TrainingSpec:
    """Return the training of a policy with the settings that the configuration has.

    >>> training_spec(TrainingSpec("mlp", ("rtt_s",)), LearningConfig(epochs=3)).epochs
    3
    """
    return replace(
        spec,
        round_samples=learning.round_samples or spec.round_samples,
        round_growth=spec.round_growth if learning.round_samples is None else 0.0,
        first_samples=learning.first_samples or spec.first_samples,
        fifo=learning.fifo_samples or spec.fifo,
        replay=spec.replay if learning.replay_samples is None else learning.replay_samples,
        epochs=learning.epochs or spec.epochs,
        target_cap_s=learning.target_cap_s or spec.target_cap_s,
    )


def _overload_limits(overload: OverloadConfig) -> OverloadLimits:
    return OverloadLimits(
        queue_enabled=overload.queue_enabled,
        queue_max_requests=overload.queue_max_requests,
        max_backlog_s=overload.max_backlog_ms / 1e3,
        max_concurrency_per_replica=overload.max_concurrency_per_replica,
        slo_ttft_s=None if overload.slo_ttft_ms is None else overload.slo_ttft_ms / 1e3,
        shed_on_objective=overload.shed_on_objective,
        slo_e2e_s=None if overload.slo_e2e_ms is None else overload.slo_e2e_ms / 1e3,
        no_replica_wait_s=overload.no_replica_wait_s,
    )


def scaling_limits(scaling: ScalingConfig) -> ScalingLimits | None:
    """Return what a group of replicas has to reach; `None` without an objective."""
    if scaling.ttft_ms is None:
        return None
    return ScalingLimits(
        ttft_s=scaling.ttft_ms / 1e3,
        share=scaling.share,
        startup_s=scaling.startup_s,
        min_replicas=scaling.min_replicas,
        max_replicas=scaling.max_replicas,
    )


def replica_specs(config: Config) -> list[ReplicaSpec]:
    """Return the Router's records of all replicas, with each model by its own name instead of an alias."""
    names = model_names(config)
    return [
        replace(spec, models=tuple(dict.fromkeys(names.get(model, model) for model in spec.models)))
        for spec in map(replica_spec, config.replicas)
    ]


def model_names(config: Config) -> dict[str, str]:
    """Return the model of each alias."""
    return {alias: model.name for model in config.models for alias in model.aliases}


def replica_spec(replica: ReplicaConfig) -> ReplicaSpec:
    """Return the Router's record of a replica."""
    capacity = replica.capacity
    return ReplicaSpec(
        name=replica.name,
        region=replica.region,
        models=replica.models,
        kv_capacity_tokens=capacity.kv_tokens,
        max_running_requests=capacity.max_running_requests,
        prefill_tokens_per_s=capacity.prefill_tokens_per_s,
        tls=replica.url.lower().startswith("https:"),
        accelerator=replica.accelerator,
        own_key=replica.api_key_env is not None,
    )


def client_rules(config: Config) -> ClientRules:
    """Return the quotas of all clients, per second."""
    clients = config.clients
    default = ClientLimits(
        clients.max_in_flight, _per_s(clients.requests_per_minute), tokens_per_s=_per_s(clients.tokens_per_minute)
    )
    named = {
        rule.name: ClientLimits(
            rule.max_in_flight or clients.max_in_flight,
            _per_s(rule.requests_per_minute or clients.requests_per_minute),
            tokens_per_s=_per_s(rule.tokens_per_minute or clients.tokens_per_minute),
        )
        for rule in clients.rules
    }
    return ClientRules(default, named)


def _per_s(per_minute: float | None) -> float | None:
    return None if per_minute is None else per_minute / 60.0


# The deadlines of an attempt's phases, by the region of its replica.


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Deadlines of one region's attempts.

    Parameters
    ----------
    connect_s:
        To open a connection: name, TCP and TLS.
    first_token_s:
        Of a stream, from dispatch to its first token.
    response_s:
        Of a response that is no stream, from dispatch to its end: nothing of it is visible before.
    stream_idle_s:
        Longest silence after the first token.
    request_s:
        From the request's first byte at the proxy to the last of its response, waits and other attempts included.
    """

    connect_s: float
    first_token_s: float
    response_s: float
    stream_idle_s: float
    request_s: float


def deadlines_by_region(config: Config) -> Mapping[str, Deadlines]:
    """Return the deadlines of each region: those of `limits`, with the region's own time to a first token.

    >>> from gorgo.config.load import parse_config
    >>> regions = b"[{name: a, limits: {first_token_timeout_s: 9}}, {name: b}]"
    >>> text = b"{proxy: {region: a}, regions: %b, replicas: [{name: r, region: a, url: 'http://127.0.0.1:1'}]}"
    >>> found = deadlines_by_region(parse_config(text % regions))
    >>> found["a"].first_token_s, found["b"].first_token_s
    (9.0, 120.0)
    """
    limits = config.limits
    common = Deadlines(
        connect_s=limits.connect_timeout_s,
        first_token_s=limits.first_token_timeout_s,
        response_s=limits.response_timeout_s,
        stream_idle_s=limits.stream_idle_timeout_s,
        request_s=limits.request_timeout_s,
    )
    first_token_s = {region.name: region.limits.first_token_timeout_s for region in config.regions}
    return {name: replace(common, first_token_s=value or common.first_token_s) for name, value in first_token_s.items()}


# The memory that this process may use: the tightest limit of its control groups, else the machine's.
#
# The default of `limits.max_buffered_bytes` is a share of it.


#: Share of the memory for buffered bytes. The rest: the process with a full prefix index, and other processes.
BUFFER_SHARE = 0.25
#: Where no limit can be read: a quarter of the smallest machine in use for a router, 2 GiB.
UNKNOWN_MEMORY_BUFFER_BYTES = 512 * 1024 * 1024


def share_of(config: Config, processes: int) -> Config:
    """Return the configuration of one of several processes: what bounds the memory of a router is divided.

    A process has the bytes of the largest body in any case: half of its buffers is granted to one request.
    """
    if processes == 1:
        return config
    limits, queue = config.limits, config.overload.queue_max_requests
    buffered = max_buffered_bytes(limits)
    limits = replace(
        limits,
        max_connections=-(-limits.max_connections // processes),
        max_in_flight=-(-limits.max_in_flight // processes),
        max_buffered_bytes=max(buffered // processes, min(buffered, 2 * limits.max_body_bytes)),
    )
    overload = replace(config.overload, queue_max_requests=-(-queue // processes))
    return replace(config, limits=limits, overload=overload)


def max_buffered_bytes(limits: LimitsConfig) -> int:
    """Return the limit of buffered bytes: that of the file, else a share of the memory."""
    if limits.max_buffered_bytes is not None:
        return limits.max_buffered_bytes
    memory = memory_bytes()
    return UNKNOWN_MEMORY_BUFFER_BYTES if memory is None else int(memory * BUFFER_SHARE)


def memory_bytes(root: Path = Path("/")) -> int | None:
    """Return the memory that this process may use, None if unknown. `root` has the files of Linux."""
    limits = [*_group_limits(root), *_physical(root)]
    return min(limits) if limits else None


def _group_limits(root: Path) -> Iterator[int]:
    """Yield the memory limits of the control groups of both versions, from the process's own to the outermost."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers not in ("", "memory") and "memory" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup"
        mount, name = (mount / "memory", "memory.limit_in_bytes") if controllers else (mount, "memory.max")
        group = PurePosixPath(path.lstrip("/"))
        for folder in (group, *group.parents):
            text = _read(mount / folder / name).strip()
            if text.isdigit():
                yield int(text)


def _physical(root: Path) -> Iterator[int]:
    """Yield the memory of the machine."""
    words = _read(root / "proc/meminfo").split()
    if words[:1] == ["MemTotal:"] and words[1].isdigit():
        yield int(words[1]) * 1024
    elif root == Path("/") and "SC_PHYS_PAGES" in os.sysconf_names:  # not Linux
        yield os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
