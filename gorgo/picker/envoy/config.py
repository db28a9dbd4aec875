"""The whole configuration of one Envoy before a picker.

Envoy listens where `gorgo serve` would: `proxy.bind`, with `proxy.tls`. Its bounds are those of `limits`.
"""

from __future__ import annotations

import yaml

from gorgo.config.model import Config
from gorgo.core.messages.request import REFUSALS
from gorgo.picker.envoy.clusters import LABELS, REPLICAS, picker_cluster, replicas_cluster
from gorgo.picker.envoy.filters import OWN, access_log, picker_filters
from gorgo.picker.envoy.types import Json, listener_address, seconds, server_tls, typed
from gorgo.picker.protocol.messages import DESTINATION

#: Beyond `picker.hold_s`: the way to the picker and back, and the decision.
MESSAGE_MARGIN_S = 10.0
#: Retries of a request that no reply has begun for; the picker names as many replicas behind the first.
RETRIES = 2
#: Connection lost or silent before a response, or a response that `gorgo serve` sends to another replica too.
_RETRY_ON = "5xx,connect-failure,refused-stream,reset,retriable-status-codes"
#: A refusal may be the fault of one replica: whether another one answers the same request says so.
_RETRIED_STATUSES = sorted({429, *REFUSALS})
#: Above the 60 s of common load balancers.
_CLIENT_IDLE_S = 75.0
#: Streams of one HTTP/2 client, and its window: a body of that size comes without a pause.
_STREAMS, _WINDOW_BYTES = 1024, 1024 * 1024

_HEAD = """\
# Envoy before `gorgo picker`, made by `gorgo picker --print-envoy`.
# Requests without a choice of the picker: {without}.
"""


def envoy_yaml(config: Config) -> str:
    """Return the configuration as YAML."""
    without = "503" if config.fleet_sources else "to the replica with fewest requests"
    return _HEAD.format(without=without) + yaml.safe_dump(envoy_config(config), sort_keys=False, width=120)


def envoy_config(config: Config) -> Json:
    """Return the configuration as plain data."""
    filters = {
        "name": "envoy.filters.network.http_connection_manager",
        "typed_config": _connection_manager(config),
    }
    chain: Json = {"filters": [filters]}
    if config.proxy.tls.cert is not None:
        chain["transport_socket"] = server_tls(config.proxy.tls, "h2", "http/1.1")
    listener = {
        "name": "clients",
        "address": listener_address(config.proxy.bind),
        # A longer body of a request is a 413: it is buffered whole.
        "per_connection_buffer_limit_bytes": config.limits.max_body_bytes,
        "filter_chains": [chain],
    }
    clusters = [replicas_cluster(config), picker_cluster(config)]
    return {"static_resources": {"listeners": [listener], "clusters": clusters}}


def _connection_manager(config: Config) -> Json:
    limits = config.limits
    window = {"initial_stream_window_size": _WINDOW_BYTES, "initial_connection_window_size": 16 * _WINDOW_BYTES}
    return typed(
        "filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix="clients",
        codec_type="AUTO",
        http2_protocol_options={"max_concurrent_streams": _STREAMS, **window},
        common_http_protocol_options={"idle_timeout": seconds(_CLIENT_IDLE_S)},
        max_request_headers_kb=max(1, min(8192, limits.max_header_bytes // 1024)),
        request_headers_timeout=seconds(limits.header_timeout_s),
        request_timeout=seconds(limits.body_timeout_s),
        # No event for so long ends a stream; the first token may take longer.
        stream_idle_timeout=seconds(_idle_s(config)),
        delayed_close_timeout="1s",
        normalize_path=True,
        merge_slashes=False,
        path_with_escaped_slashes_action="REJECT_REQUEST",
        use_remote_address=True,
        preserve_external_request_id=True,
        always_set_request_id_in_response=True,
        server_header_transformation="PASS_THROUGH",
        # A client may not choose its replica.
        early_header_mutation_extensions=[_strip()],
        route_config={"name": "clients", "virtual_hosts": [_virtual_host(config)]},
        http_filters=[
            *picker_filters(config.picker.hold_s + MESSAGE_MARGIN_S),
            {
                "name": "envoy.filters.http.router",
                "typed_config": typed("filters.http.router.v3.Router", suppress_envoy_headers=True),
            },
        ],
        access_log=[access_log()],
    )


def _strip() -> Json:
    names = (DESTINATION, f"{DESTINATION}-subset", f"{DESTINATION}-served")
    kind = "http.early_header_mutation.header_mutation.v3.HeaderMutation"
    mutation = typed(kind, mutations=[{"remove": name} for name in names])
    return {"name": "envoy.http.early_header_mutation.header_mutation", "typed_config": mutation}


def _virtual_host(config: Config) -> Json:
    route: Json = {
        "cluster": REPLICAS,
        "timeout": seconds(config.limits.request_timeout_s),
        "idle_timeout": seconds(_idle_s(config)),
    }
    if not config.fleet_sources:
        route["retry_policy"] = {
            "retry_on": _RETRY_ON,
            "retriable_status_codes": _RETRIED_STATUSES,
            "num_retries": RETRIES,
            # For the replicas that Envoy chooses itself, after the picker's or without one.
            "retry_host_predicate": [_previous_hosts()],
            "host_selection_retry_max_attempts": 5,
            "per_try_idle_timeout": seconds(_try_idle_s(config)),
            "retry_back_off": {"base_interval": "0.01s", "max_interval": "0.05s"},
        }
    return {
        "name": "clients",
        "domains": ["*"],
        "routes": [{"match": {"prefix": "/"}, "route": route}],
        "response_headers_to_add": _labels(config),
    }


def _labels(config: Config) -> list[Json]:
    """Return the headers by which the proxy says who has answered; a replica's own of these names are replaced."""
    # A list of replicas names who has served after a retry. A found one is not retried: the choice has served.
    served = f"%DYNAMIC_METADATA({OWN}:" if config.fleet_sources else f"%UPSTREAM_METADATA({LABELS}:"
    decided = f"%DYNAMIC_METADATA({OWN}:"
    sources = {"replica": served, "region": served, "policy": decided, "weights-version": decided}
    return [
        {
            "header": {"key": f"x-gorgo-{name}", "value": f"{source}{name})%"},
            "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
        }
        for name, source in sources.items()
    ]


def _previous_hosts() -> Json:
    name = "envoy.retry_host_predicates.previous_hosts"
    return {"name": name, "typed_config": typed("retry.host.previous_hosts.v3.PreviousHostsPredicate")}


def _try_idle_s(config: Config) -> float:
    """Return how long a replica may be silent: another one is tried if nothing of its response has come."""
    by_region = (region.limits.first_token_timeout_s or 0.0 for region in config.regions)
    limits = config.limits
    return max(limits.first_token_timeout_s, limits.stream_idle_timeout_s, *by_region)


def _idle_s(config: Config) -> float:
    """Return how long nothing may be heard from client and replicas: in the queue, and at each of them."""
    return config.picker.hold_s + (1 if config.fleet_sources else 1 + RETRIES) * _try_idle_s(config)
