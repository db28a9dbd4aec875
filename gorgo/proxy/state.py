"""What all exchanges of one proxy share, wired at start; a reload changes parts of it between two exchanges' steps.

Owns nothing but the wiring and two facts about the process: whether it is stopping, and which exchanges are open.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from uuid import uuid4

import numpy as np

from gorgo.config.deadlines import deadlines_by_region
from gorgo.config.model import Config, LimitsConfig, OverloadConfig, ReplicaConfig
from gorgo.core.admission.deadline import OverloadLimits
from gorgo.core.dispatch.hedging import HedgeLimits
from gorgo.core.fleet.spec import ReplicaSpec
from gorgo.core.limits import RouterLimits
from gorgo.core.policy.interface import Policy
from gorgo.core.policy.weights import Weights
from gorgo.core.prompt.fingerprint import Fingerprinter
from gorgo.core.prompt.token_ratio import BytesPerToken
from gorgo.core.router import Router
from gorgo.policies.registry import make_shadow
from gorgo.proxy.admin.self_check import INTERNAL_VARIABLE
from gorgo.proxy.clock import Clock, epoch_clock
from gorgo.proxy.control.service import ControlService
from gorgo.proxy.control.startup import initial_state
from gorgo.proxy.control.state_file import PersistedState, StateFile
from gorgo.proxy.http.client_auth import ClientKeys, read_client_keys
from gorgo.proxy.http.tls import ServedTls, served_tls, upstream_tls
from gorgo.proxy.request_options import ClientPolicies, client_rules
from gorgo.proxy.router_gateway import RouterGateway
from gorgo.proxy.stored_responses import StoredResponses
from gorgo.proxy.telemetry.metrics import Metrics
from gorgo.proxy.telemetry.probe_history import ProbeHistory
from gorgo.proxy.telemetry.request_log import RequestLog
from gorgo.proxy.telemetry.tracing import make_tracing
from gorgo.proxy.uploads import UploadCounter
from gorgo.proxy.upstream.target import Target, api_key, make_target

if TYPE_CHECKING:
    from gorgo.proxy.telemetry.spans import Tracing

#: Text per block of the prefix index: 64 tokens at 4 bytes each.
BLOCK_BYTES = 256
#: Scrapes and probes older than so many intervals are stale, where the configuration does not say.
STALE_INTERVALS = 3


@dataclass(slots=True)
class RunningProxy:
    """The running proxy."""

    config: Config
    limits: LimitsConfig
    router: Router
    clock: Clock
    metrics: Metrics
    #: How exchanges speak to the Router.
    gateway: RouterGateway
    #: What operators and tuners change goes through here.
    control: ControlService
    #: What clients and models are granted; replaced by a reload.
    client_policies: ClientPolicies
    #: Replaced as a whole by a reload, in the same step as the Router's fleet: who is in one is in the other.
    targets: Mapping[str, Target]
    #: Of all replicas, those that a reload adds included.
    tls: ssl.SSLContext
    fingerprinter: Fingerprinter
    uploads: UploadCounter
    #: By `clock`.
    started_s: float
    #: `None` while clients need no key.
    client_keys: ClientKeys | None = None
    #: `None` where the data listener speaks plain HTTP.
    served_tls: ServedTls | None = None
    ratios: BytesPerToken = field(default_factory=BytesPerToken)
    stored_responses: StoredResponses = field(default_factory=StoredResponses)
    #: The last probes of each replica, for the status page.
    probe_history: ProbeHistory = field(default_factory=ProbeHistory)
    #: `None` where none is asked for.
    request_log: RequestLog | None = None
    #: `None` unless requests are traced.
    tracing: Tracing | None = None
    #: `GET /admin/check` answers.
    internal_routes: bool = False
    #: Set once, at the first signal: nothing new is taken.
    stopping: bool = False
    #: Tasks of the open exchanges, for the end of the grace period.
    exchanges: set[asyncio.Task[object]] = field(default_factory=set)
    #: No longer in the fleet, but with streams that have not ended.
    draining_targets: set[Target] = field(default_factory=set)

    async def aclose(self) -> None:
        self.gateway.close()
        await self.control.aclose()
        if self.request_log is not None:
            self.request_log.close()
        if self.tracing is not None:
            await self.tracing.export.aclose()
        for target in (*self.targets.values(), *self.draining_targets):
            await target.upstream.aclose()


def build_proxy(
    config: Config,
    *,
    policy: Policy,
    weights: Weights | None,
    environ: Mapping[str, str],
    key: int,
    seed: int,
    state_file: StateFile | None = None,
    kept: PersistedState | None = None,
    tls: ssl.SSLContext | None = None,
) -> RunningProxy:
    """Wire a proxy. Needs a running loop: connection pools belong to one.

    `kept` is what `state_file` held, which may go before `policy` and `weights`. `tls` is for replicas without files
    of their own; the default trusts the system's authorities, and takes 30 ms to read them.
    """
    start = initial_state(kept, config, policy, weights, source="" if state_file is None else str(state_file.path))
    # Before anything is opened, because this can fail.
    keys = {replica.name: api_key(replica, environ) for replica in config.replicas}
    client_keys = read_client_keys(config.clients, environ)
    served = served_tls(config.proxy.tls)
    tls = tls or ssl.create_default_context()
    tls_of = {replica.name: upstream_tls(replica, tls) for replica in config.replicas}
    clock = epoch_clock()
    router = Router(
        [replica_spec(replica) for replica in config.replicas],
        start.policy,
        rng=np.random.default_rng(seed),
        boot_id=uuid4().hex,
        weights=start.weights,
        limits=router_limits(config),
        shadow=make_shadow(config.proxy.shadow_policy, start.policy),
    )
    for name in sorted(start.draining):
        router.drain(name, now=clock())
    metrics = Metrics(router, clock)
    deadlines = deadlines_by_region(config)
    targets = {
        replica.name: make_target(
            replica, config.limits, deadlines[replica.region], keys[replica.name], tls_of[replica.name]
        )
        for replica in config.replicas
    }
    return RunningProxy(
        config=config,
        limits=config.limits,
        router=router,
        clock=clock,
        metrics=metrics,
        gateway=RouterGateway(router, clock),
        client_policies=ClientPolicies.for_client(config),
        control=ControlService(router, clock, metrics, start, config, state_file),
        targets=targets,
        tls=tls,
        fingerprinter=Fingerprinter(key=key, block_bytes=BLOCK_BYTES),
        uploads=UploadCounter(router),
        started_s=clock(),
        client_keys=client_keys,
        served_tls=served,
        tracing=make_tracing(config.proxy.tracing, region=config.proxy.region, count=metrics.trace_spans),
        internal_routes=environ.get(INTERNAL_VARIABLE) == "1",
    )


def router_limits(config: Config) -> RouterLimits:
    """The Router's bounds, as far as the file sets them."""
    proxy = config.proxy
    stale_after_s = proxy.stale_after_s or STALE_INTERVALS * max(proxy.probe_interval_s, proxy.scrape_interval_s)
    return RouterLimits(
        max_attempts=config.limits.max_attempts,
        max_in_flight=config.limits.max_in_flight,
        stale_after_s=stale_after_s,
        rtt_ewma_alpha=proxy.rtt_ewma_alpha,
        max_index_blocks=config.limits.prefix_index_blocks,
        overload=_overload_limits(config.overload),
        hedging=HedgeLimits(
            budget_ratio=config.overload.hedge_budget_ratio, delay_s=config.overload.hedge_delay_ms / 1e3
        ),
        retry_budget_ratio=config.overload.retry_budget_ratio,
        slow_start_s=config.overload.slow_start_s,
        region_window_s=proxy.probe_interval_s,
        clients=client_rules(config),
    )


def _overload_limits(overload: OverloadConfig) -> OverloadLimits:
    return OverloadLimits(
        queue_enabled=overload.queue_enabled,
        queue_max_requests=overload.queue_max_requests,
        max_backlog_s=overload.max_backlog_ms / 1e3,
        max_concurrency_per_replica=overload.max_concurrency_per_replica,
        slo_ttft_s=None if overload.slo_ttft_ms is None else overload.slo_ttft_ms / 1e3,
        slo_e2e_s=None if overload.slo_e2e_ms is None else overload.slo_e2e_ms / 1e3,
        infeasible_max_wait_s=overload.infeasible_max_wait_ms / 1e3,
        no_replica_wait_s=overload.no_replica_wait_s,
    )


def replica_spec(replica: ReplicaConfig) -> ReplicaSpec:
    """A replica as the Router knows it."""
    capacity = replica.capacity
    return ReplicaSpec(
        name=replica.name,
        region=replica.region,
        models=replica.models,
        kv_capacity_tokens=capacity.kv_tokens,
        max_running_requests=capacity.max_running_requests,
        prefill_base_s=None if capacity.prefill_base_ms is None else capacity.prefill_base_ms / 1e3,
        prefill_tokens_per_s=capacity.prefill_tokens_per_s,
        prefill_kappa_s=capacity.prefill_kappa_s,
        tls=replica.url.lower().startswith("https:"),
    )
