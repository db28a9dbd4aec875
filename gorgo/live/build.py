"""The wiring of what routes: every part below the front end is made here, from the configuration."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Mapping
from typing import TYPE_CHECKING
from uuid import uuid4

import numpy as np

from gorgo.config.model import Config, TracingConfig
from gorgo.config.registered import RegisteredReplicas
from gorgo.config.router_settings import deadlines_by_region, max_buffered_bytes, replica_specs
from gorgo.config.values import BLOCK_BYTES
from gorgo.core.limits import BufferBudget
from gorgo.core.policy.interface import Policy
from gorgo.core.policy.weights import Weights
from gorgo.core.prompt.fingerprint import Fingerprinter
from gorgo.core.router import Router
from gorgo.errors import ConfigError
from gorgo.fleet_sources.fleet import FoundFleet
from gorgo.live.cache_push import PushService
from gorgo.live.control.service import ControlService
from gorgo.live.control.state_file import PersistedState, StateFile, initial_state
from gorgo.live.event_loop import RouterGateway, epoch_clock
from gorgo.live.extras import check_extras, require_tracing
from gorgo.live.http.body import UploadCounter
from gorgo.live.http.tls import served_tls, shared_tls, upstream_tls
from gorgo.live.logs import log
from gorgo.live.parsing.workers import BodyWorkers
from gorgo.live.policy_training import PolicyTraining
from gorgo.live.prompt_tokens import PromptTokens, read_tokenizers
from gorgo.live.replica_secrets import replica_secrets
from gorgo.live.request_options import ClientPolicies, read_client_keys
from gorgo.live.scaling import ScalingService
from gorgo.live.served_models import ModelLists, ServedModels
from gorgo.live.state import INTERNAL_VARIABLE, PROXY, FrontEndKind, LiveState, Replicas, Routing, Telemetry
from gorgo.live.telemetry.health import HealthLog
from gorgo.live.telemetry.metrics import Metrics
from gorgo.live.upstream.target import make_target
from gorgo.live.workers.link import WorkerLink
from gorgo.policies.registry import make_shadow

if TYPE_CHECKING:
    from gorgo.live.telemetry.spans import Count, Tracing


def build_live(
    config: Config,
    *,
    policy: Policy,
    weights: Weights | None,
    environ: Mapping[str, str],
    key: int,
    seed: int,
    state_file: StateFile | None = None,
    persisted: PersistedState | None = None,
    tls: ssl.SSLContext | None = None,
    kind: FrontEndKind = PROXY,
    plain: bool = False,
    link: WorkerLink | None = None,
) -> LiveState:
    """Wire what routes. Needs a running event loop, which owns the connection pools.

    `persisted` is the content of `state_file` and may override `policy` and `weights`. `tls` is for replicas without
    own files; the default trusts the system's authorities, read when a replica needs them. `kind` is the front end's.
    `plain`: HTTP by stock libraries. `link` leads to the other workers of the router.
    """
    registered = _registered(persisted, config)
    file_config, config = config, registered.merged(config)
    start = initial_state(persisted, config, policy, weights, source="" if state_file is None else str(state_file.path))
    # Before anything is opened, because this can fail.
    secrets = {replica.name: replica_secrets(replica, environ) for replica in config.replicas}
    check_extras(config.replicas, config.fleet_sources)
    client_keys = read_client_keys(config.clients)
    served = served_tls(config.proxy.tls)
    tokens_of = read_tokenizers(config.models)
    fingerprinter = Fingerprinter(key=_fingerprint_key(config, key, environ), block_bytes=BLOCK_BYTES)
    system_tls = shared_tls(tls)
    tls_of = {replica.name: upstream_tls(replica, system_tls) for replica in config.replicas}
    clock = epoch_clock()
    router = Router(
        replica_specs(config),
        start.policy,
        rng=np.random.default_rng(seed),
        boot_id=uuid4().hex,
        weights=start.weights,
        limits=kind.router_limits(config),
        shadow=_shadow(config, policy, start.policy),
    )
    if persisted is not None:
        router.restore_tokens(persisted.learned)
    for name in sorted(start.draining):
        router.replicas.drain(name, now=clock())
    buffers = BufferBudget(max_buffered_bytes(config.limits))
    found_fleet = FoundFleet(config.fleet_sources, now=clock())
    metrics = Metrics(router, clock, buffers, found_fleet)
    deadlines = deadlines_by_region(config)
    targets = {
        replica.name: make_target(
            replica,
            config.limits,
            deadlines[replica.region],
            secrets[replica.name],
            tls_of[replica.name],
            buffers,
            plain=plain,
        )
        for replica in config.replicas
    }
    gateway = RouterGateway(router, clock, HealthLog(metrics))
    peer_store = None
    if config.shared is not None:
        from gorgo.live.peer_store.service import PeerStoreService

        peer_store = PeerStoreService.connecting(
            config.shared, environ, router, gateway, clock, key_id=fingerprinter.key_id
        )
        metrics.peers.read = peer_store.measures
    local_peers = None
    if link is not None:
        router.quotas.shared = link.counts
        from gorgo.live.peer_store.local import LocalPeers
        from gorgo.live.workers.reports import SharedReports

        reports = SharedReports(link.start.counts, link.processes, own=link.number)
        key_id = fingerprinter.key_id
        local_peers = LocalPeers(link, reports, router, gateway, clock, key_id=key_id, store=peer_store)
        if peer_store is None:
            metrics.peers.read = local_peers.measures
    models = ServedModels(config)
    scaling = ScalingService(router, clock, config.scaling)
    metrics.wanted.read = scaling.wanted
    prompt_tokens = PromptTokens(
        tokens_of,
        router.caches.block_sizes,
        metrics.exact_prompt,
        lambda base: models.serving(base, prompt_tokens.models),
        clock,
    )
    routing = Routing(
        router=router,
        clock=clock,
        gateway=gateway,
        control=ControlService(
            router, clock, metrics, start, state_file if link is None or link.leads else None, registered
        ),
        training=PolicyTraining(
            router,
            clock,
            metrics.learning,
            config.proxy.learning,
            None if state_file is None else state_file.path,
            seed=seed % (1 << 32),
        ),
        client_policies=ClientPolicies.for_client(config),
        models=models,
        fingerprinter=fingerprinter,
        body_workers=BodyWorkers(fingerprinter),
        prompt_tokens=prompt_tokens,
        uploads=UploadCounter(router),
        scaling=scaling,
        client_keys=client_keys,
        peer_store=peer_store,
        local_peers=local_peers,
    )
    replicas = Replicas(
        targets=targets,
        tls=system_tls,
        found=found_fleet,
        pushes=PushService(router, gateway, clock),
        model_lists=ModelLists(clock),
    )
    tracing = make_tracing(config.proxy.tracing, region=config.proxy.region, count=metrics.trace_spans)
    return LiveState(
        kind=kind,
        routing=routing,
        replicas=replicas,
        telemetry=Telemetry(metrics=metrics, tracing=tracing),
        config=config,
        file_config=file_config,
        limits=config.limits,
        buffers=buffers,
        started_s=clock(),
        served_tls=served,
        internal_routes=environ.get(INTERNAL_VARIABLE) == "1",
        plain=plain,
        link=link,
    )


def make_tracing(config: TracingConfig, *, region: str, count: Count) -> Tracing | None:
    """Return the tracing of the configuration, `None` without an endpoint: nothing of it is loaded then.

    Raises `MissingExtra` without the extra `otel`.
    """
    if config.endpoint is None:
        return None
    require_tracing()
    from gorgo.live.telemetry.spans import start_tracing

    return start_tracing(config.endpoint, config.sample_ratio, region=region, count=count)


def _fingerprint_key(config: Config, drawn: int, environ: Mapping[str, str]) -> int:
    """Return the key of fingerprints: the group's, if the router has one."""
    if config.shared is None:
        return drawn
    from gorgo.live.peer_store.connection import group_key

    return group_key(config.shared, environ)


def _shadow(config: Config, configured: Policy, policy: Policy) -> Policy | None:
    """Return the shadow policy for `policy`, which the state file may have instead of `configured`."""
    try:
        return make_shadow(config.proxy.shadow_policy, policy)
    except ConfigError as error:
        if policy.name == configured.name:
            raise
        log("shadow_not_set", level=logging.WARNING, error=str(error))
        return None


def _registered(persisted: PersistedState | None, config: Config) -> RegisteredReplicas:
    """Return the replicas of the state file that fit the configuration; the log has the others."""
    registered = RegisteredReplicas(() if persisted is None else persisted.registered)
    for name in registered.named_by(config):
        registered.remove(name)
        log("registration_ended", replica=name, reason="regions.yaml names it")
    for name in registered.unfit(config):
        registered.remove(name)
        log("registration_ended", level=logging.ERROR, replica=name, reason="its region is not in regions.yaml")
    return registered
