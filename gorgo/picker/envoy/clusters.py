"""Envoy's clusters: the replicas, and the picker.

Replicas that are all in regions.yaml are a list that Envoy has too: it retries down the picker's fallbacks by itself,
and goes on by its own policy while no picker answers. Those of fleet sources come and go: Envoy connects to whichever
address the picker names, and has no other.
"""

from __future__ import annotations

from ipaddress import ip_address
from urllib.parse import urlsplit

from gorgo.config.addresses import split_bind
from gorgo.config.constants import REPLICA_KEEP_ALIVE_S
from gorgo.config.model import Config, ReplicaConfig
from gorgo.picker.envoy.filters import LB, OWN, PICKER
from gorgo.picker.envoy.types import Json, address, client_tls, seconds, typed

#: Cluster of the replicas.
REPLICAS = "replicas"
#: Namespace of a replica's names in Envoy's metadata of endpoints.
LABELS = "gorgo"
#: Authorities of the machine, where a replica has none of its own.
SYSTEM_CA = "/etc/ssl/certs/ca-certificates.crt"
#: Between two checks of the picker's health, s: a stopping one is left within two of them.
_HEALTH_S = 1.0
#: Bound of a check, s. Two without an answer are a stalled picker; one may be a busy machine.
_HEALTH_ANSWER_S = 2.0
#: Between two pings on a connection to it, and their bound, s: calls of a stalled picker are given up by then. Every
#: 5 s is as often as the picker's gRPC library allows.
_KEEPALIVE_S, _KEEPALIVE_ANSWER_S = 6.0, 3.0
#: Retries under way at once: half of the requests, as where one of two replicas is lost. Envoy's default is 3.
_RETRIES: Json = {"budget_percent": {"value": 50.0}, "min_retry_concurrency": 16}
_HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def replicas_cluster(config: Config) -> Json:
    """Return the cluster of the replicas."""
    limits = config.limits
    cluster = {
        "name": REPLICAS,
        "connect_timeout": seconds(limits.connect_timeout_s),
        "circuit_breakers": _bounds(limits.max_connections, retry_budget=_RETRIES),
        "per_connection_buffer_limit_bytes": limits.max_body_bytes,
        "typed_extension_protocol_options": {
            _HTTP_OPTIONS: typed(
                "upstreams.http.v3.HttpProtocolOptions",
                common_http_protocol_options={"idle_timeout": seconds(REPLICA_KEEP_ALIVE_S)},
                explicit_http_config={"http_protocol_options": {}},
            )
        },
    }
    return cluster | (_by_address() if config.fleet_sources else _by_list(config))


def picker_cluster(config: Config) -> Json:
    """Return the cluster of the picker."""
    host, port = split_bind(config.picker.bind)
    keepalive = {"interval": seconds(_KEEPALIVE_S), "timeout": seconds(_KEEPALIVE_ANSWER_S)}
    options = typed(
        "upstreams.http.v3.HttpProtocolOptions",
        explicit_http_config={"http2_protocol_options": {"connection_keepalive": keepalive}},
    )
    check = {
        "timeout": seconds(_HEALTH_ANSWER_S),
        "interval": seconds(_HEALTH_S),
        # Else the second check comes a minute after the first, which no traffic has preceded.
        "no_traffic_interval": seconds(_HEALTH_S),
        "unhealthy_threshold": 2,
        "healthy_threshold": 1,
        "grpc_health_check": {"service_name": "deciding"},
    }
    endpoint = {"endpoint": {"address": address(_WILDCARDS.get(host, host), port)}}
    cluster: Json = {
        "name": PICKER,
        "type": "STRICT_DNS",
        "connect_timeout": "1s",
        # An unhealthy picker is not called, though there be no other: each call would wait for `message_timeout`.
        "common_lb_config": {"healthy_panic_threshold": {"value": 0.0}},
        "circuit_breakers": _bounds(2 * config.limits.max_connections),
        "typed_extension_protocol_options": {_HTTP_OPTIONS: options},
        "health_checks": [check],
        "load_assignment": {"cluster_name": PICKER, "endpoints": [{"lb_endpoints": [endpoint]}]},
    }
    cert = config.picker.tls.cert
    if cert is not None:
        cluster["transport_socket"] = client_tls(sni=None, ca_file=cert, alpn=("h2",))
    return cluster


def _bounds(most: int, **more: Json) -> Json:
    return {"thresholds": [{"max_connections": most, "max_pending_requests": most, "max_requests": most, **more}]}


def _by_address() -> Json:
    # Of metadata, which no client can set.
    key = {"key": OWN, "path": [{"key": "destination"}]}
    return {"type": "ORIGINAL_DST", "lb_policy": "CLUSTER_PROVIDED", "original_dst_lb_config": {"metadata_key": key}}


def _by_list(config: Config) -> Json:
    key = {"key": LB, "path": [{"key": "x-gateway-destination-endpoint"}]}
    own = {"name": "envoy.load_balancing_policies.least_request"}
    own["typed_config"] = typed("load_balancing_policies.least_request.v3.LeastRequest")  # type: ignore[assignment]
    override = typed(
        "load_balancing_policies.override_host.v3.OverrideHost",
        override_host_sources=[{"metadata": key}],
        fallback_policy={"policies": [{"typed_extension_config": own}]},
    )
    policy = {"name": "envoy.load_balancing_policies.override_host", "typed_config": override}
    places = {_place(replica): replica for replica in reversed(config.replicas)}
    cluster: Json = {
        "type": "STRICT_DNS",
        "load_balancing_policy": {"policies": [{"typed_extension_config": policy}]},
        "load_assignment": {
            "cluster_name": REPLICAS,
            "endpoints": [{"lb_endpoints": [_endpoint(*place, places[place]) for place in reversed(places)]}],
        },
    }
    secured = {place: replica for place, replica in places.items() if place[2]}
    if secured:
        cluster["transport_socket_matches"] = [_socket(place, replica) for place, replica in secured.items()]
    return cluster


def _place(replica: ReplicaConfig) -> tuple[str, int, bool]:
    parts = urlsplit(replica.url)
    secure = parts.scheme == "https"
    return parts.hostname or "", parts.port or (443 if secure else 80), secure


def _endpoint(host: str, port: int, secure: bool, replica: ReplicaConfig) -> Json:
    metadata: Json = {LABELS: {"replica": replica.name, "region": replica.region}}
    if secure:
        metadata["envoy.transport_socket_match"] = {"tls": f"{host}:{port}"}
    return {"endpoint": {"address": address(host, port)}, "metadata": {"filter_metadata": metadata}}


def _socket(place: tuple[str, int, bool], replica: ReplicaConfig) -> Json:
    host, port, _ = place
    tls = client_tls(sni=None if _is_address(host) else host, ca_file=replica.ca_file or SYSTEM_CA)
    return {"name": f"{host}:{port}", "match": {"tls": f"{host}:{port}"}, "transport_socket": tls}


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
