"""regions.yaml to the settings of the Router: bounds, replicas and client quotas."""

from __future__ import annotations

from dataclasses import replace

from gorgo.config.constants import STALE_INTERVALS
from gorgo.config.model import Config, LearningConfig, OverloadConfig, ReplicaConfig
from gorgo.core.fleet.spec import ReplicaSpec
from gorgo.core.limits import ClientLimits, ClientRules, HedgeLimits, OverloadLimits, RouterLimits
from gorgo.core.training.spec import TrainingSpec


def router_limits(config: Config) -> RouterLimits:
    """Return the Router's bounds; those that the file cannot set keep their defaults."""
    proxy = config.proxy
    return RouterLimits(
        max_attempts=config.limits.max_attempts,
        max_in_flight=config.limits.max_in_flight,
        sampled_replicas=config.limits.sampled_replicas,
        stale_after_s=STALE_INTERVALS * max(proxy.probe_interval_s, proxy.scrape_interval_s),
        max_index_blocks=config.limits.prefix_index_blocks,
        overload=_overload_limits(config.overload),
        hedging=HedgeLimits(budget_ratio=config.overload.hedge_budget_ratio),
        retry_budget_ratio=config.overload.retry_budget_ratio,
        slow_start_s=config.overload.slow_start_s,
        region_window_s=proxy.probe_interval_s,
        clients=client_rules(config),
    )


def training_spec(own: TrainingSpec, learning: LearningConfig) -> TrainingSpec:
    """Return the training of a policy with the settings that the configuration has.

    >>> training_spec(TrainingSpec("mlp", ("rtt_s",)), LearningConfig(epochs=3)).epochs
    3
    """
    return replace(
        own,
        round_samples=learning.round_samples or own.round_samples,
        round_growth=own.round_growth if learning.round_samples is None else 0.0,
        first_samples=learning.first_samples or own.first_samples,
        fifo=learning.fifo_samples or own.fifo,
        replay=own.replay if learning.replay_samples is None else learning.replay_samples,
        epochs=learning.epochs or own.epochs,
        target_cap_s=learning.target_cap_s or own.target_cap_s,
    )


def _overload_limits(overload: OverloadConfig) -> OverloadLimits:
    return OverloadLimits(
        queue_enabled=overload.queue_enabled,
        queue_max_requests=overload.queue_max_requests,
        max_backlog_s=overload.max_backlog_ms / 1e3,
        max_concurrency_per_replica=overload.max_concurrency_per_replica,
        slo_ttft_s=None if overload.slo_ttft_ms is None else overload.slo_ttft_ms / 1e3,
        slo_e2e_s=None if overload.slo_e2e_ms is None else overload.slo_e2e_ms / 1e3,
        no_replica_wait_s=overload.no_replica_wait_s,
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
    )


def client_rules(config: Config) -> ClientRules:
    """Return the quotas of all clients, per second."""
    clients = config.clients
    default = ClientLimits(
        clients.max_in_flight,
        _per_s(clients.requests_per_minute),
        tokens_per_s=_per_s(clients.tokens_per_minute),
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
