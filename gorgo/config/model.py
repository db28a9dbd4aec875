"""The shape of regions.yaml as frozen dataclasses: every key with type, default and range.

Owns all sections but `replicas` and `fleet_sources`, which are in `config.fleet`. Leaves contradictions between keys to
`load`. Units are in the names: seconds, or `ms`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from gorgo.config.fleet import FleetSourceConfig, ReplicaConfig, checked_source
from gorgo.config.values import (
    CONNECTIONS_PER_REPLICA,
    FIRST_TOKEN_TIMEOUT_S,
    SIMULATED_TOKENIZER,
    Bind,
    Count,
    EnvironmentName,
    FilePath,
    HeaderName,
    Name,
    NotNegative,
    Origin,
    Positive,
    Samples,
    StoreUrl,
    Text,
    Url,
    some,
    strict,
)


@strict
@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """PEM files for TLS of a listener; a reload reads them again."""

    cert: FilePath | None = None
    key: FilePath | None = None


def paired(tls: TlsConfig) -> TlsConfig:
    """Return `tls` if it has both files or none."""
    if (tls.cert is None) != (tls.key is None):
        raise ValueError("cert and key, both or neither")
    return tls


@strict
@dataclass(frozen=True, slots=True, kw_only=True)
class PickerTlsConfig(TlsConfig):
    """Files of the picker's listener, and those by which it knows its Envoy."""

    #: Whoever connects shows a certificate that one of these authorities has signed.
    client_ca: FilePath | None = None
    #: Envoy's own, on Envoy's machine: they are printed for it, and the picker reads neither.
    client_cert: FilePath | None = None
    client_key: FilePath | None = None


def _both_paired(tls: PickerTlsConfig) -> PickerTlsConfig:
    """Return `tls` if each certificate has its key, and those of clients a listener with TLS."""
    paired(tls)
    if (tls.client_cert is None) != (tls.client_key is None):
        raise ValueError("client_cert and client_key, both or neither")
    if tls.client_ca is not None and tls.cert is None:
        raise ValueError("cert and key beside client_ca")
    if tls.client_cert is not None and tls.client_ca is None:
        raise ValueError("client_ca beside client_cert")
    return tls


@strict
@dataclass(frozen=True, slots=True, kw_only=True)
class PickerConfig:
    """The endpoint picker; `gorgo serve` reads none of it. A change needs a restart."""

    bind: Bind = "127.0.0.1:9002"
    tls: Annotated[PickerTlsConfig, AfterValidator(_both_paired)] = field(default_factory=PickerTlsConfig)
    #: Longest time to read a body and in the queue. Envoy's `message_timeout` is ten seconds more, or it would answer.
    hold_s: Positive = 20.0


# `shared` in regions.yaml: the store in which several routers of one fleet report to each other.


@strict
@dataclass(frozen=True, slots=True, kw_only=True)
class SharedConfig:
    """A Redis or Valkey server, and the group of routers that use it. A change needs a restart."""

    #: `rediss` for TLS. A password would be in logs and process lists, so it is not accepted here.
    url: StoreUrl
    #: Routers of one group have one fleet and one fingerprint key; prefix of all their keys in the store.
    group: Name
    #: Variable with the group's fingerprint key: hashes of prompts mean the same to all its routers.
    key_env: EnvironmentName
    #: The server's default user without one.
    username: Text | None = None
    #: Variable with the password.
    password_env: EnvironmentName | None = None
    #: The only trusted authorities (PEM), with `rediss`.
    ca_file: FilePath | None = None
    #: Name of this router in the group; default: that of the host.
    router: Name | None = None


def checked_shared(shared: SharedConfig | None) -> SharedConfig | None:
    """Return `shared` if its keys fit each other."""
    if shared is None:
        return None
    if shared.ca_file is not None and not shared.url.startswith("rediss:"):
        raise ValueError("a rediss:// url beside ca_file")
    if shared.username is not None and shared.password_env is None:
        raise ValueError("password_env beside username")
    return shared


@strict
@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRuleConfig:
    """Quotas and regions of one client, by the name of its key."""

    name: Name
    max_in_flight: Count | None = None
    requests_per_minute: Positive | None = None
    tokens_per_minute: Positive | None = None
    #: Default priority of its queued requests, and the highest that a header may set.
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    #: Regions that may serve it; empty means any.
    allowed_regions: tuple[Name, ...] = ()
    #: Whether it gets the estimated cached tokens, the predicted TTFT, and the names of replica and region.
    estimates: bool = False
    #: Fields of a body that steer the engine, and that it may send (`live.request.parse`).
    engine_fields: Annotated[tuple[Text, ...], Field(max_length=64)] = ()


@strict
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Aliases and regions of one model, for every client."""

    name: Text
    #: Other names that clients may call it; the engine gets the name that it knows.
    aliases: tuple[Text, ...] = ()
    #: Regions that may serve it; empty means any.
    allowed_regions: tuple[Name, ...] = ()
    #: File `tokenizer.json` of the model, or `simulated`; prompts are estimated without one.
    tokenizer: FilePath | None = None
    #: Jinja or JSON file with the template of chats; default: those beside the tokenizer.
    chat_template: FilePath | None = None


def _with_tokenizer(model: ModelConfig) -> ModelConfig:
    if model.chat_template is not None and model.tokenizer in (None, SIMULATED_TOKENIZER):
        raise ValueError("chat_template beside a tokenizer file")
    return model


@strict
@dataclass(frozen=True, slots=True, kw_only=True)
class ClientsConfig:
    """Keys and quotas of clients. Without `keys_file` requests need no key."""

    #: A reload may require less of clients than the running configuration.
    open: bool = False
    #: SHA-256 of each key.
    keys_file: FilePath | None = None
    #: Quotas of each client without own rule.
    max_in_flight: Count | None = None
    requests_per_minute: Positive | None = None
    tokens_per_minute: Positive | None = None
    rules: tuple[ClientRuleConfig, ...] = ()


@strict
@dataclass(frozen=True, slots=True, kw_only=True)
class TracingConfig:
    """Traces of requests to an OpenTelemetry collector; off without an endpoint."""

    #: OTLP over HTTP.
    endpoint: Url | None = None
    #: Traced share of requests without `traceparent`.
    sample_ratio: Annotated[float, Field(ge=0, le=1)] = 0.01


@strict
@dataclass(frozen=True, slots=True, kw_only=True)
class CorsConfig:
    """Web pages whose scripts may call the data listener; off without an origin."""

    allow_origins: Annotated[tuple[Origin, ...], Field(max_length=64)] = ()


def _trainable(learning: LearningConfig) -> LearningConfig:
    first, stored = learning.first_samples, learning.fifo_samples
    if first is not None and stored is not None and first > stored:
        raise ValueError("first_samples of at most fifo_samples")
    return learning


@strict
@dataclass(frozen=True, slots=True, kw_only=True)
class LearningConfig:
    """Training of the policy or shadow policy that learns. `None` is as that policy has it."""

    #: A model to start from (`gorgo learn`), if it is newer than the one beside the state file.
    model_file: FilePath | None = None
    #: Train on the proxy's own traffic.
    online: bool = True
    round_samples: Samples | None = None
    first_samples: Samples | None = None
    fifo_samples: Samples | None = None
    replay_samples: Annotated[int, Field(ge=0, le=200_000)] | None = None
    epochs: Annotated[int, Field(ge=1, le=1000)] | None = None
    target_cap_s: Positive | None = None


@strict
@dataclass(frozen=True, slots=True, kw_only=True)
class MultiDepthConfig:
    """Routes of the policy `multi-depth`."""

    max_routes: Annotated[int, Field(ge=1, le=10_000_000)] = 100_000
    #: Without use for so long a route is void.
    ttl_s: Positive = 3600.0


@strict
@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyConfig:
    """The regional proxy itself."""

    region: Name
    policy: Text = "gorgo-ms"
    weights: Mapping[Text, Annotated[float, Field(allow_inf_nan=False)]] = field(default_factory=dict)
    #: So many requests of a thousand go to any eligible replica, so that a log of decisions says what others would do.
    explore: Annotated[float, Field(ge=0, le=1000)] = 0.0
    #: Scores each decision and changes none.
    shadow_policy: Text | None = None
    learning: Annotated[LearningConfig, AfterValidator(_trainable)] = field(default_factory=LearningConfig)
    multi_depth: MultiDepthConfig = field(default_factory=MultiDepthConfig)
    #: Processes that serve the listener as one router; `auto`: one per processor that this one may use.
    processes: Annotated[int, Field(ge=1, le=64)] | Literal["auto"] = 1
    bind: Bind = "127.0.0.1:8080"
    admin_bind: Bind = "127.0.0.1:9090"
    tls: Annotated[TlsConfig, AfterValidator(paired)] = field(default_factory=TlsConfig)
    tracing: TracingConfig = field(default_factory=TracingConfig)
    cors: CorsConfig = field(default_factory=CorsConfig)
    #: The admin listener has `/metrics` too; `admin`: it alone.
    metrics_listener: Literal["data", "admin"] = "data"
    probe_interval_s: Positive = 30.0
    #: A scrape takes an engine about a millisecond: more than ten a second slow it down.
    #: Default: as old as the policy may read a signal, at most 30 s (`core.policy.interface.scrape_interval_s`).
    scrape_interval_s: Annotated[float, Field(ge=0.1, allow_inf_nan=False)] | None = None
    #: Headers that pass in both directions beside those that always do (`live.http.headers`).
    pass_headers: Annotated[tuple[HeaderName, ...], Field(max_length=64)] = ()
    #: `/ready` is 503 with fewer healthy replicas.
    min_ready_replicas: Count = 1


@strict
@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    """Bounds. regions.yaml has the reason of each default."""

    max_connections: Count = 8192
    max_header_bytes: Annotated[int, Field(ge=1024)] = 64 * 1024
    header_timeout_s: Positive = 10.0
    max_body_bytes: Count = 32 * 1024 * 1024
    body_timeout_s: Positive = 60.0
    #: Default: a share of the memory (`config.router_settings`).
    max_buffered_bytes: Count | None = None
    max_attempts: Count = 3
    continuations: Annotated[int, Field(ge=0, le=16)] = 2
    max_in_flight: Count = 4096
    sampled_replicas: Count = 128
    connections_per_replica: Count = CONNECTIONS_PER_REPLICA
    connect_timeout_s: Positive = 5.0
    first_token_timeout_s: Positive = FIRST_TOKEN_TIMEOUT_S
    response_timeout_s: Positive = 600.0
    stream_idle_timeout_s: Positive = 60.0
    request_timeout_s: Positive = 3600.0
    prefix_index_blocks: Count = 4_000_000
    shutdown_grace_s: NotNegative = 30.0


@strict
@dataclass(frozen=True, slots=True, kw_only=True)
class OverloadConfig:
    """Queue, deadlines, hedges, retries and slow start."""

    #: Queue requests for a replica with capacity, under a policy that predicts.
    queue_enabled: bool = True
    queue_max_requests: Count = 1000
    max_backlog_ms: Positive = 200.0
    max_concurrency_per_replica: Count | None = None
    slo_ttft_ms: Positive | None = None
    #: Under a policy that takes objectives, shed by the header as by a deadline.
    shed_on_objective: bool = False
    slo_e2e_ms: Positive | None = None
    no_replica_wait_s: NotNegative = 2.0
    hedge_budget_ratio: Annotated[float, Field(ge=0, le=0.5)] = 0.03
    retry_budget_ratio: Annotated[float, Field(ge=0, le=1)] = 0.2
    slow_start_s: NotNegative = 10.0


def _bounded(scaling: ScalingConfig) -> ScalingConfig:
    if scaling.min_replicas > scaling.max_replicas:
        raise ValueError("max_replicas of at least min_replicas")
    return scaling


@strict
@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingConfig:
    """The wanted number of replicas per region and model; without `ttft_ms` none is said."""

    ttft_ms: Positive | None = None
    share: Annotated[float, Field(gt=0, lt=1)] = 0.95
    startup_s: Positive = 240.0
    min_replicas: Count = 1
    max_replicas: Annotated[int, Field(ge=1, le=1024)] = 64
    #: Shared beginnings of prompts that a new replica is sent; 0 retains none.
    warm_prompts: Annotated[int, Field(ge=0, le=64)] = 0


@strict
@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    """Network and engines of `gorgo engine`, `gorgo demo` and simulations."""

    #: Mean round trip from the proxy's region to each region.
    rtt_ms: Mapping[Name, NotNegative] = field(default_factory=dict)
    profile: Text = "2xL40S-Qwen3.5-35B-A3B-FP8-fitted"
    #: By replica, where it is another.
    profiles: Mapping[Name, Text] = field(default_factory=dict)
    seed: Annotated[int, Field(ge=0)] = 0


@strict
@dataclass(frozen=True, slots=True, kw_only=True)
class RegionLimitsConfig:
    """Limits of attempts in one region. Engines differ by region in the time to a first token, not in the others."""

    first_token_timeout_s: Positive | None = None


@strict
@dataclass(frozen=True, slots=True, kw_only=True)
class RegionConfig:
    """A location of replicas or clients."""

    name: Name
    limits: RegionLimitsConfig = field(default_factory=RegionLimitsConfig)


@strict
@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The content of regions.yaml."""

    proxy: ProxyConfig
    regions: Annotated[tuple[RegionConfig, ...], AfterValidator(some)]
    #: May be empty with a fleet source.
    replicas: tuple[ReplicaConfig, ...] = ()
    fleet_sources: Annotated[
        tuple[Annotated[FleetSourceConfig, AfterValidator(checked_source)], ...], Field(max_length=16)
    ] = ()
    picker: PickerConfig = field(default_factory=PickerConfig)
    #: `None` for a router that reports to no other.
    shared: Annotated[SharedConfig | None, AfterValidator(checked_shared)] = None
    clients: ClientsConfig = field(default_factory=ClientsConfig)
    models: tuple[Annotated[ModelConfig, AfterValidator(_with_tokenizer)], ...] = ()
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    overload: OverloadConfig = field(default_factory=OverloadConfig)
    scaling: Annotated[ScalingConfig, AfterValidator(_bounded)] = field(default_factory=ScalingConfig)
    simulation: SimulationConfig = field(default_factory=SimulationConfig)
