"""What all exchanges of one proxy share, wired once at start.

Owns nothing but the wiring and two facts about the process: whether it is stopping, and which exchanges are open.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from uuid import uuid4

import numpy as np

from gorgo.config.model import Config, Limits, Replica
from gorgo.core.fingerprint import Fingerprinter
from gorgo.core.policy import Policy
from gorgo.core.replica import ReplicaSpec
from gorgo.core.router import Router, RouterLimits
from gorgo.core.tokens import BytesPerToken
from gorgo.core.weights import Weights
from gorgo.engines.base import EngineDialect
from gorgo.engines.registry import dialect
from gorgo.engines.reports import ReportWatch
from gorgo.errors import ConfigError
from gorgo.proxy.clock import Clock, epoch_clock
from gorgo.proxy.homes import ResponseHomes
from gorgo.proxy.metrics import Metrics
from gorgo.proxy.upstream import HttpUpstream

#: Text per block of the prefix index: 64 tokens at 4 bytes each.
BLOCK_BYTES = 256
#: Scrapes and probes older than so many intervals are stale, where the configuration does not say.
STALE_INTERVALS = 3


@dataclass(frozen=True, slots=True)
class Target:
    """One replica as the proxy reaches it. The key is kept out of `repr`, so that no log can show it."""

    name: str
    region: str
    upstream: HttpUpstream
    dialect: EngineDialect
    #: What the engine should report and does not.
    reports: ReportWatch
    request_usage: bool = False
    api_key: str | None = field(default=None, repr=False)


@dataclass(slots=True)
class ProxyState:
    """The running proxy."""

    config: Config
    limits: Limits
    router: Router
    clock: Clock
    metrics: Metrics
    targets: dict[str, Target]
    fingerprinter: Fingerprinter
    ratios: BytesPerToken = field(default_factory=BytesPerToken)
    homes: ResponseHomes = field(default_factory=ResponseHomes)
    #: Set once, at the first signal: nothing new is taken.
    stopping: bool = False
    #: Tasks of the open exchanges, for the end of the grace period.
    exchanges: set[asyncio.Task[object]] = field(default_factory=set)

    async def aclose(self) -> None:
        for target in self.targets.values():
            await target.upstream.aclose()


def make_state(
    config: Config, *, policy: Policy, weights: Weights | None, environ: Mapping[str, str], key: int, seed: int
) -> ProxyState:
    """Wire a proxy. Needs a running loop: connection pools belong to one."""
    # Before anything is opened, because this can fail.
    keys = {replica.name: api_key(replica, environ) for replica in config.replicas}
    clock = epoch_clock()
    router = Router(
        [_spec(replica) for replica in config.replicas],
        policy,
        rng=np.random.default_rng(seed),
        boot_id=uuid4().hex,
        weights=weights,
        limits=_limits(config),
    )
    tls = ssl.create_default_context()
    targets = {replica.name: _target(replica, config.limits, keys[replica.name], tls) for replica in config.replicas}
    return ProxyState(
        config=config,
        limits=config.limits,
        router=router,
        clock=clock,
        metrics=Metrics(router, clock),
        targets=targets,
        fingerprinter=Fingerprinter(key=key, block_bytes=BLOCK_BYTES),
    )


def _limits(config: Config) -> RouterLimits:
    proxy = config.proxy
    stale_after_s = proxy.stale_after_s or STALE_INTERVALS * max(proxy.probe_interval_s, proxy.scrape_interval_s)
    return RouterLimits(
        max_attempts=config.limits.max_attempts,
        max_in_flight=config.limits.max_in_flight,
        stale_after_s=stale_after_s,
        rtt_ewma_alpha=proxy.rtt_ewma_alpha,
        max_index_blocks=config.limits.prefix_index_blocks,
    )


def _spec(replica: Replica) -> ReplicaSpec:
    capacity = replica.capacity
    return ReplicaSpec(
        name=replica.name,
        region=replica.region,
        models=replica.models,
        kv_capacity_tokens=capacity.kv_tokens,
        max_running_requests=capacity.max_running_requests,
    )


def _target(replica: Replica, limits: Limits, key: str | None, tls: ssl.SSLContext) -> Target:
    spoken = dialect(replica.engine)
    return Target(
        name=replica.name,
        region=replica.region,
        upstream=HttpUpstream(
            replica.url,
            connections=limits.connections_per_replica,
            connect_timeout_s=limits.connect_timeout_s,
            tls=tls,
        ),
        dialect=spoken,
        reports=ReportWatch(spoken),
        request_usage=replica.request_usage,
        api_key=key,
    )


def api_key(replica: Replica, environ: Mapping[str, str]) -> str | None:
    """The replica's own key. Raises `ConfigError` when the variable that should hold it is not set."""
    if replica.api_key_env is None:
        return None
    key = environ.get(replica.api_key_env, "").strip()
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(
            f"replica {replica.name!r}: the environment variable {replica.api_key_env} must hold its API key"
        )
    return key
