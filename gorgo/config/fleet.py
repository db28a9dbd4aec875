"""The entries of `replicas` and of `fleet_sources` in regions.yaml, and where a replica's KV cache events come from.

Owns the keys of both with their checks. Leaves the other sections to `config.model`, and finding the replicas of a
source to `gorgo.fleet_sources`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, WrapValidator

from gorgo.config.values import (
    Count,
    EngineName,
    EnvironmentName,
    FilePath,
    KvEndpoint,
    Name,
    Port,
    Positive,
    Text,
    Url,
    auto_or,
    strict,
)


@strict
@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventsConfig:
    """Where the KV cache events of a replica come from; without an endpoint, where its engine says."""

    #: Of the events, and of the replays of missed ones, if the engine offers any.
    endpoint: KvEndpoint | None = None
    replay: KvEndpoint | None = None
    #: Prefix of the topics to receive; by default that of the engine, or any.
    topic: Annotated[str, Field(max_length=256)] | None = None
    #: `bind` if the engine connects to the proxy.
    mode: Literal["connect", "bind"] = "connect"


def _reachable(events: KvEventsConfig) -> KvEventsConfig:
    if events.endpoint is None and events.mode == "bind":
        raise ValueError("an endpoint beside mode: bind")
    if events.endpoint is None and events.replay is not None:
        raise ValueError("an endpoint beside replay")
    if events.mode == "connect" and events.endpoint is not None and "//*" in events.endpoint:
        raise ValueError("an endpoint with the engine's host, or mode: bind")
    if events.replay is not None and "//*" in events.replay:
        raise ValueError("a replay with the engine's host")
    return events


#: `auto` is as the engine announces them.
KvEvents = Annotated[KvEventsConfig, AfterValidator(_reachable), WrapValidator(auto_or({}))]


@strict
@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityConfig:
    """Priors of a replica's size, which the engine's report replaces, and of its prefill speed, which is learned."""

    kv_tokens: Count | None = None
    max_running_requests: Count | None = None
    prefill_tokens_per_s: Positive | None = None


@strict
@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig:
    """One engine process at a URL."""

    name: Name
    region: Name
    url: Url
    engine: EngineName = "auto"
    #: Models served; empty means any.
    models: tuple[Text, ...] = ()
    accelerator: Text | None = None
    #: Environment variable with the API key; the key itself is never in the file.
    api_key_env: EnvironmentName | None = None
    #: That of the token by which its engine may push what is cached.
    push_token_env: EnvironmentName | None = None
    #: Request `usage` in every stream and remove the extra chunk.
    request_usage: bool = False
    #: Trusted authorities instead of the system's, and the client certificate of the proxy.
    ca_file: FilePath | None = None
    client_cert: FilePath | None = None
    client_key: FilePath | None = None
    #: No new requests. A change of this key overrides the mark of an operator.
    draining: bool = False
    capacity: CapacityConfig = field(default_factory=CapacityConfig)
    #: Off by default; needs the extra `events`.
    kv_events: KvEvents | None = None

    @property
    def refuses(self) -> Callable[[str], str | None] | None:
        """Return what says why its name must not stand for an address; `None`: a name of the file may be any."""
        return None


# One entry of `fleet_sources`: where replicas come from that regions.yaml does not name.


#: A folder that Kubernetes mounts into each container of a pod.
SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"

#: Required keys by kind, and those that only this kind has.
_REQUIRED: Mapping[str, tuple[str, ...]] = {
    "dns": ("host",),
    "endpoint-slices": ("service",),
    "pods": ("selector",),
    "inference-pool": ("pool",),
}
_ALLOWED: Mapping[str, frozenset[str]] = {
    "dns": frozenset({"host", "port", "interval_s"}),
    "endpoint-slices": frozenset({"service", "namespace", "port", "port_name", "node_regions"}),
    "pods": frozenset({"selector", "namespace", "port", "port_name", "node_regions"}),
    "inference-pool": frozenset({"pool", "namespace", "node_regions"}),
}
_CHECKED = ("host", "port", "port_name", "interval_s", "service", "namespace", "selector", "pool", "node_regions")


@strict
@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReplicaConfig:
    """Keys that the replicas of a source share. Annotations and labels of an object take precedence.

    A `ReplicaConfig` without what the source finds (name, URL, draining). The region may come from the object, the
    engine is found by default, and `scheme` completes the address.
    """

    #: Where an object has no region.
    region: Name | None = None
    scheme: Literal["http", "https"] = "http"
    engine: EngineName = "auto"
    models: tuple[Text, ...] = ()
    accelerator: Text | None = None
    api_key_env: EnvironmentName | None = None
    #: One token speaks for all replicas of the source. No annotation names it: an object would then choose which
    #: variable of the proxy lets it push, and that may be another's secret.
    push_token_env: EnvironmentName | None = None
    request_usage: bool = False
    ca_file: FilePath | None = None
    client_cert: FilePath | None = None
    client_key: FilePath | None = None
    capacity: CapacityConfig = field(default_factory=CapacityConfig)
    #: Off by default; needs the extra `events`.
    kv_events: KvEvents | None = None


@strict
@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesApiConfig:
    """The API server of Kubernetes; by default that of the cluster in which the proxy runs."""

    url: Url | None = None
    #: Read anew for each request, because Kubernetes replaces the token.
    token_file: FilePath = f"{SERVICE_ACCOUNT}/token"
    ca_file: FilePath = f"{SERVICE_ACCOUNT}/ca.crt"


@strict
@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSourceConfig:
    """One source. The keys that it needs depend on its kind."""

    #: In names of replicas from DNS, in metrics and in the log.
    name: Name
    kind: Literal["dns", "endpoint-slices", "pods", "inference-pool"]
    #: Without `port` a name of SRV records.
    host: Text | None = None
    #: Number or name of the port, where the object has several.
    port: Port | None = None
    port_name: Name | None = None
    #: Interval of look-ups.
    interval_s: Annotated[float, Field(ge=1, le=3600, allow_inf_nan=False)] = 10.0
    #: Default: the namespace of the proxy.
    namespace: Name | None = None
    service: Name | None = None
    #: Labels that a pod has.
    selector: Mapping[Text, str] = field(default_factory=dict)
    pool: Name | None = None
    #: Read the region of a replica from its node; this needs a right to list nodes.
    node_regions: bool = False
    #: Accept replicas at loopback and link-local addresses, which are the proxy's own machine or its cloud's metadata.
    local_addresses: bool = False
    api: KubernetesApiConfig = field(default_factory=KubernetesApiConfig)
    replica: SourceReplicaConfig = field(default_factory=SourceReplicaConfig)

    @property
    def watches(self) -> bool:
        """Whether the source is an API server of Kubernetes."""
        return self.kind != "dns"

    @property
    def reads_srv_records(self) -> bool:
        """Whether the port of a replica is that of its SRV record; this needs the extra `dns`."""
        return self.kind == "dns" and self.port is None


_DEFAULTS = {name: FleetSourceConfig.__dataclass_fields__[name].default for name in _CHECKED if name != "selector"}


def checked_source(source: FleetSourceConfig) -> FleetSourceConfig:
    """Return `source` if it has the keys of its kind and no other."""
    missing = [key for key in _REQUIRED[source.kind] if not getattr(source, key)]
    if missing:
        raise ValueError(f"{' and '.join(missing)} with kind: {source.kind}")
    if source.kind == "pods" and source.port is None and source.port_name is None:
        raise ValueError("port or port_name with kind: pods")
    if source.kind == "dns" and source.port is None and not str(source.host).startswith("_"):
        raise ValueError(
            "port with kind: dns, or a host such as _http._tcp.engines.internal, whose SRV records have it"
        )
    if source.port is not None and source.port_name is not None:
        raise ValueError("port or port_name, not both")
    other = [key for key in _CHECKED if getattr(source, key) != _DEFAULTS.get(key, {})]
    unused = [key for key in other if key not in _ALLOWED[source.kind]]
    if unused:
        raise ValueError(f"no {' and no '.join(unused)} with kind: {source.kind}")
    tls = source.replica
    if (tls.client_cert is None) != (tls.client_key is None):
        raise ValueError("client_cert and client_key of its replicas, both or neither")
    if tls.scheme == "http" and (tls.ca_file or tls.client_cert):
        raise ValueError("scheme: https for its replicas beside their TLS files")
    return source
