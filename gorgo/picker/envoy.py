"""The whole configuration of one Envoy before a picker.

Envoy listens where `gorgo serve` would: `proxy.bind`, with `proxy.tls`. Its bounds are those of `limits`. The parts of
the configuration, in the order of the file: shapes that recur, the filter that reads the engine's counts of tokens, the
filters that call the picker with the access log, the clusters, and the listener that joins them.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import yaml

from gorgo.config.fleet import ReplicaConfig
from gorgo.config.model import Config, TlsConfig
from gorgo.config.values import REPLICA_KEEP_ALIVE_S, is_ip_address, split_bind
from gorgo.core.messages.request import REFUSALS
from gorgo.core.record import record
from gorgo.errors import InvalidValueError
from gorgo.picker.lifetime import BODY_BYTES
from gorgo.picker.protocol.messages import BODY, DESTINATION, SERVED_BY, STATUS, TRIED, USAGE

Json = dict[str, Any]

_TYPES = "type.googleapis.com/envoy."


def typed(kind: str, **fields: Any) -> Json:
    """Return a message of Envoy's extensions, by the rest of its type's name."""
    return {"@type": f"{_TYPES}extensions.{kind}", **fields}


def seconds(value: float) -> str:
    """Return a duration."""
    return f"{value:g}s"


def address(host: str, port: int) -> Json:
    """Return a socket's address."""
    return {"socket_address": {"address": host, "port_value": port}}


def listener_address(bind: str) -> Json:
    """Return the address to listen on."""
    return address(*split_bind(bind))


def server_tls(files: TlsConfig, *alpn: str) -> Json:
    """Return TLS of a listener."""
    common = {"alpn_protocols": list(alpn), "tls_certificates": [_certificate(files)]}
    context = typed("transport_sockets.tls.v3.DownstreamTlsContext", common_tls_context=common)
    return {"name": "envoy.transport_sockets.tls", "typed_config": context}


def _certificate(files: TlsConfig) -> Json:
    return {"certificate_chain": {"filename": files.cert}, "private_key": {"filename": files.key}}


def client_tls(*, sni: str | None, ca_file: str, alpn: tuple[str, ...] = (), shown: TlsConfig | None = None) -> Json:
    """Return TLS to a server that an authority of `ca_file` has certified; `shown` is Envoy's own certificate."""
    common: Json = {"validation_context": {"trusted_ca": {"filename": ca_file}}}
    if alpn:
        common["alpn_protocols"] = list(alpn)
    if shown is not None:
        common["tls_certificates"] = [_certificate(shown)]
        # The picker demands it with certificates; Envoy's default as a client was TLS 1.2.
        common["tls_params"] = {"tls_maximum_protocol_version": "TLSv1_3"}
    if sni is not None:
        match = {"san_type": "DNS", "matcher": {"exact": sni}}
        common["validation_context"]["match_typed_subject_alt_names"] = [match]
    fields: Json = {"common_tls_context": common} | ({} if sni is None else {"sni": sni})
    context = typed("transport_sockets.tls.v3.UpstreamTlsContext", **fields)
    return {"name": "envoy.transport_sockets.tls", "typed_config": context}


# Envoy's filter that leaves the access log what it needs of an answer: a Lua script.
#
# A short answer in one piece is in the log whole, and the picker judges it and reads its counts. Of any other one the
# script does nothing with a chunk but to retain the last ones; once the answer has ended, the last object under a key
# of counts is searched for them. Envoy's own `sse_to_metadata` parses the JSON of each event instead, and takes
# longer. Little is retained of a stream: more would cost each event a part of the collector's work.


#: Type of an answer in one piece, which the log has if it is short.
_WHOLE_TYPE = "application/json"
#: Bytes of one chunk's end that are retained, more than any event with counts; and least bytes of a retained part.
_CHUNK_BYTES, _PART_BYTES = 8192, 256
_SCRIPT = """\
function envoy_on_response(handle)
  local headers = handle:headers()
%(hide)s  local kind, coding = headers:get("content-type") or "", headers:get("content-encoding")
  local is_stream = kind:find("^text/event%%-stream")
  if is_stream and coding or not (is_stream or kind:find("^%(type)s")) then return end
  -- What has come of an answer in one piece, while it is short; else the last four parts: a short one is joined with
  -- the next.
  local whole, first, second, third, last = not is_stream and "", "", "", "", ""
  for chunk in handle:bodyChunks() do
    local length = chunk:length()
    if length > 0 then
      if whole and #whole + length <= %(whole)d then
        whole = whole .. chunk:getBytes(0, length)
      else
        local from = length > %(chunk)d and length - %(chunk)d or 0
        local part = chunk:getBytes(from, length - from)
        if whole then
          -- The counts of a batch would have to be summed.
          if coding or (whole .. chunk:getBytes(0, length - from)):find("^%%s*%%[") then return end
          last, whole = whole:sub(-%(chunk)d), nil
        end
        if #last < %(part)d then last = last .. part else first, second, third, last = second, third, last, part end
      end
    end
  end
  local metadata = handle:streamInfo():dynamicMetadata()
  if whole then
    -- As text: the log's entries have no other.
    if whole ~= "" then metadata:set("%(usage)s", "%(body)s", handle:base64Escape(whole)) end
    return
  end
  local text = first .. second .. third .. last
  -- A quote within a text of JSON is escaped: no text looks like a key. A plain search costs less than a pattern.
  local function last_of(key)
    local at, found = text:find(key, 1, true), 0
    while at do
      if text:find("^%%s*:%%s*{", at + #key) then found = at end
      at = text:find(key, at + #key, true)
    end
    return found
  end
  local start = math.max(last_of('"usage"'), last_of('"meta_info"'))
  if start == 0 then return end
  local found = text:sub(start)
  local function read(name) return tonumber(found:match('"' .. name .. '"%%s*:%%s*(%%d+)')) end
  local prompt = read("prompt_tokens") or read("input_tokens")
  local cached = read("cached_tokens")
  local from_cache = read("cache_read_input_tokens")
  if from_cache then
    -- Anthropic's: beside the input.
    cached = from_cache
    if prompt then prompt = prompt + from_cache + (read("cache_creation_input_tokens") or 0) end
  end
  local function set(name, value) if value then metadata:set("%(usage)s", name, value) end end
  set("prompt_tokens", prompt)
  set("cached_tokens", cached)
  set("completion_tokens", read("completion_tokens") or read("output_tokens"))
end
"""


#: The picker names replica and region in its metadata to clients that may know them.
_HIDE = """\
  local own = handle:streamInfo():dynamicMetadata():get("%s")
  if not (own and own["replica"]) then
    headers:remove("x-gorgo-replica")
    headers:remove("x-gorgo-region")
  end
"""


def usage_filter(*, hides_replica: bool) -> Json:
    """Return the filter; with `hides_replica` it removes the replica's name where the picker has not given it."""
    hide = _HIDE % OWN if hides_replica else ""
    bounds = {"chunk": _CHUNK_BYTES, "part": _PART_BYTES, "whole": BODY_BYTES}
    script = _SCRIPT % {"usage": USAGE, "body": BODY, "type": _WHOLE_TYPE, "hide": hide, **bounds}
    config = typed("filters.http.lua.v3.Lua", default_source_code={"inline_string": script})
    return {"name": "envoy.filters.http.lua", "typed_config": config}


# Envoy's HTTP filters before a picker, and its access log.
#
# 1. `envoy.filters.http.ext_proc`: the decision. Envoy buffers the request's body, and the call stays open until the
#    exchange ends: its end releases the replica's load. A picker that dies cuts no reply.
# 2. `first`: one message to the picker at the first chunk of each reply that may be a stream, for which no chunk waits.
# 3. `envoy.filters.http.lua`: a short answer, or the engine's counts of tokens, for the access log (`usage_filter`).
# 4. The access log: reason, durations and what that filter has found, batched.


#: Cluster of the picker.
PICKER = "picker"
#: Namespaces of Envoy's dynamic metadata: the choice; the picker's own.
LB, OWN = "envoy.lb", "epp"
#: Of entries of the access log.
LOG_NAME, FIRST_BODY_TAG = "epp", "first_body_us"
_FIRST_BODY = "%COMMON_DURATION(DS_RX_BEG:US_RX_BODY_BEG:us)%"
#: Delay of an entry, s. One message has all entries of it, unless they have more bytes: some twenty short answers, for
#: which the picker needs two ms.
_FLUSH_S, _FLUSH_BYTES = 0.05, 48 * 1024


def picker_filters(config: Config, message_timeout_s: float) -> list[Json]:
    """Return the filters before the router's."""
    hides = config.clients.keys_file is not None
    return [_decision(message_timeout_s), _first_token(message_timeout_s), usage_filter(hides_replica=hides)]


def access_log() -> Json:
    """Return the access log by gRPC."""
    common = {
        "log_name": LOG_NAME,
        "transport_api_version": "V3",
        "buffer_flush_interval": seconds(_FLUSH_S),
        "buffer_size_bytes": _FLUSH_BYTES,
        "grpc_service": _service(),
        "custom_tags": [{"tag": FIRST_BODY_TAG, "value": _FIRST_BODY}],
    }
    kind = "access_loggers.grpc.v3.HttpGrpcAccessLogConfig"
    return {"name": "envoy.access_loggers.http_grpc", "typed_config": typed(kind, common_config=common)}


def _service() -> Json:
    # A call lasts as long as its exchange.
    return {"envoy_grpc": {"cluster_name": PICKER}, "timeout": "0s"}


def _decision(message_timeout_s: float) -> Json:
    mode = {
        "request_header_mode": "SEND",
        "request_body_mode": "BUFFERED",
        "request_trailer_mode": "SKIP",
        "response_header_mode": "SKIP",
        "response_body_mode": "NONE",
        "response_trailer_mode": "SKIP",
    }
    config = typed(
        "filters.http.ext_proc.v3.ExternalProcessor",
        grpc_service=_service(),
        processing_mode=mode,
        message_timeout=seconds(message_timeout_s),
        # Replies in flight survive the picker. A request without a choice is the cluster's to answer.
        failure_mode_allow=True,
        # The picker bounds the retries of a request by `x-envoy-max-retries`, and by `x-envoy-retry-on` allows those of
        # a request that may be sent twice.
        mutation_rules={"allow_envoy": True},
        metadata_options={"receiving_namespaces": {"untyped": [LB, OWN]}},
    )
    return {"name": "envoy.filters.http.ext_proc", "typed_config": config}


def _first_token(message_timeout_s: float) -> Json:
    mode = {
        "request_header_mode": "SKIP",
        "request_body_mode": "NONE",
        "request_trailer_mode": "SKIP",
        "response_header_mode": "SKIP",
        "response_body_mode": "STREAMED",
        "response_trailer_mode": "SKIP",
    }
    config = typed(
        "filters.http.ext_proc.v3.ExternalProcessor",
        grpc_service=_service(),
        processing_mode=mode,
        message_timeout=seconds(message_timeout_s),
        # Without it a picker that is down would cut the reply, though no chunk waits for it.
        failure_mode_allow=True,
        observability_mode=True,
        # After a retry of Envoy another replica has answered than the one that was chosen.
        response_attributes=[SERVED_BY, STATUS],
        metadata_options={"forwarding_namespaces": {"untyped": [OWN]}},
    )
    call = {"name": "envoy.filters.http.ext_proc", "typed_config": config}
    skip = {"name": "skip", "typed_config": typed("filters.common.matcher.action.v3.SkipFilter")}
    in_log = {"and_matcher": {"predicate": [_starts("Response", "content-type", _WHOLE_TYPE), _stored()]}}
    matchers = {"matcher_list": {"matchers": [{"predicate": in_log, "on_match": {"action": skip}}]}}
    delegate = typed("common.matching.v3.ExtensionWithMatcher", extension_config=call, xds_matcher=matchers)
    return {"name": "first", "typed_config": delegate}


def _stored() -> Json:
    """Return what is true of every path but those whose answers the next request may name: that does not wait."""
    return {"not_matcher": _starts("Request", ":path", "/v1/responses")}


def _starts(kind: str, header: str, text: str) -> Json:
    """Return what is true of a request or response whose `header` begins with `text`."""
    source = {"@type": f"{_TYPES}type.matcher.v3.Http{kind}HeaderMatchInput", "header_name": header}
    return {"single_predicate": {"input": {"name": header, "typed_config": source}, "value_match": {"prefix": text}}}


# Envoy's clusters: the replicas, and the picker.
#
# Replicas that are all in regions.yaml are a list that Envoy has too: it retries down the picker's fallbacks by
# itself, and goes on by its own policy while no picker answers. Not so where the picker's choice is more than a good
# one (`is_closed`): then no replica but those that it names gets the request. Those of fleet sources come and go: Envoy
# connects to whichever address the picker names, and has no other.


#: Cluster of the replicas.
REPLICAS = "replicas"
#: Namespace of a replica's names in Envoy's metadata of endpoints.
LABELS = "gorgo"
#: Key of endpoints' metadata that none has.
NO_REPLICA = "no_replica"
#: Authorities of the machine, where a replica has none of its own.
SYSTEM_CA = "/etc/ssl/certs/ca-certificates.crt"


@record
class Patience:
    """How long Envoy bears with a picker that does not answer.

    Parameters
    ----------
    health_answer_s, unhealthy_after:
        Bound of a check, one of which begins each `_HEALTH_S`, and how many in a row must fail.
    keepalive_s, keepalive_answer_s:
        Between two pings on a connection, and their bound: its calls are given up then.
    """

    health_answer_s: float
    unhealthy_after: int
    keepalive_s: float
    keepalive_answer_s: float


#: Between two checks of the picker's health, s.
_HEALTH_S = 1.0
#: With a list of replicas: a stalled picker costs a request 2.5 s at most, as Envoy chooses by itself then. One late
#: answer of a busy machine costs a few worse choices.
_WITH_LIST = Patience(health_answer_s=1.5, unhealthy_after=1, keepalive_s=1.0, keepalive_answer_s=1.5)
#: Without one a request that is given up is a 503, so a busy machine is borne with longer.
_WITHOUT_LIST = Patience(health_answer_s=2.0, unhealthy_after=2, keepalive_s=6.0, keepalive_answer_s=3.0)
#: Retries under way at once: half of the requests, as where one of two replicas is lost. Envoy's default is 3.
_RETRIES: Json = {"budget_percent": {"value": 50.0}, "min_retry_concurrency": 16}
_HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def is_closed(config: Config) -> bool:
    """Return whether a request without the picker's choice is a 503.

    So it is where the picker alone checks client keys, holds clients or models to regions, or has engines' keys, of
    which each is for its own replica; and where Envoy has no list.
    """
    return bool(
        config.fleet_sources
        or config.clients.keys_file is not None
        or any(model.allowed_regions for model in config.models)
        or any(replica.api_key_env is not None for replica in config.replicas)
    )


#: Of a retry Envoy shows the end alone. A try that fails leaves its status, which says whether the replica is full,
#: broken, or refuses one client's key. Runs in no try that goes well.
_TRIED_SCRIPT = """\
function envoy_on_response(handle)
  local metadata, status = handle:streamInfo():dynamicMetadata(), handle:headers():get(":status")
  local own = metadata:get("%(own)s")
  local tried = own and own["%(tried)s"]
  metadata:set("%(own)s", "%(tried)s", tried and tried .. "," .. status or status)
end
"""


def _tried_filters() -> list[Json]:
    """Return the filters of each try: that of statuses, and Envoy's last one."""
    lua = typed(
        "filters.http.lua.v3.Lua", default_source_code={"inline_string": _TRIED_SCRIPT % {"own": OWN, "tried": TRIED}}
    )
    skip = "filters.common.matcher.action.v3.SkipFilter"
    by_class = {"@type": "type.googleapis.com/envoy.type.matcher.v3.HttpResponseStatusCodeClassMatchInput"}
    tree = {
        "input": {"name": "class", "typed_config": by_class},
        "exact_match_map": {
            "map": {well: {"action": {"name": "skip", "typed_config": typed(skip)}} for well in ("1xx", "2xx", "3xx")}
        },
    }
    failed = typed(
        "common.matching.v3.ExtensionWithMatcher",
        extension_config={"name": "envoy.filters.http.lua", "typed_config": lua},
        xds_matcher={"matcher_tree": tree},
    )
    codec = typed("filters.http.upstream_codec.v3.UpstreamCodec")
    return [
        {"name": TRIED, "typed_config": failed},
        {"name": "envoy.filters.http.upstream_codec", "typed_config": codec},
    ]


def replicas_cluster(config: Config) -> Json:
    """Return the cluster of the replicas."""
    limits = config.limits
    # A found fleet is not retried.
    filters: Json = {} if config.fleet_sources else {"http_filters": _tried_filters()}
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
                **filters,
            )
        },
    }
    return cluster | (_by_address() if config.fleet_sources else _by_list(config))


def picker_cluster(config: Config) -> Json:
    """Return the cluster of the picker."""
    host, port = split_bind(config.picker.bind)
    patience = _WITHOUT_LIST if is_closed(config) else _WITH_LIST
    keepalive = {"interval": seconds(patience.keepalive_s), "timeout": seconds(patience.keepalive_answer_s)}
    options = typed(
        "upstreams.http.v3.HttpProtocolOptions",
        explicit_http_config={"http2_protocol_options": {"connection_keepalive": keepalive}},
    )
    check = {
        "timeout": seconds(patience.health_answer_s),
        "interval": seconds(_HEALTH_S),
        # Else the second check comes a minute after the first, which no traffic has preceded.
        "no_traffic_interval": seconds(_HEALTH_S),
        "unhealthy_threshold": patience.unhealthy_after,
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
    files = config.picker.tls
    if files.client_ca is not None and files.client_cert is None:
        raise InvalidValueError("picker.tls", "client_ca without a certificate of Envoy", "client_cert and client_key")
    if files.cert is not None:
        shown = TlsConfig(cert=files.client_cert, key=files.client_key) if files.client_cert is not None else None
        cluster["transport_socket"] = client_tls(sni=None, ca_file=files.cert, alpn=("h2",), shown=shown)
    return cluster


def _bounds(most: int, **more: Json) -> Json:
    return {"thresholds": [{"max_connections": most, "max_pending_requests": most, "max_requests": most, **more}]}


def _by_address() -> Json:
    # Of metadata, which no client can set.
    key = {"key": OWN, "path": [{"key": "destination"}]}
    return {"type": "ORIGINAL_DST", "lb_policy": "CLUSTER_PROVIDED", "original_dst_lb_config": {"metadata_key": key}}


def _by_list(config: Config) -> Json:
    key = {"key": LB, "path": [{"key": "x-gateway-destination-endpoint"}]}
    balancer: Json = {"name": "envoy.load_balancing_policies.least_request"}
    balancer["typed_config"] = typed("load_balancing_policies.least_request.v3.LeastRequest")
    if is_closed(config):
        # Of a subset that no request names: none.
        refusal = typed(
            "load_balancing_policies.subset.v3.Subset",
            fallback_policy="NO_FALLBACK",
            subset_selectors=[{"keys": [NO_REPLICA], "fallback_policy": "NO_FALLBACK"}],
            subset_lb_policy={"policies": [{"typed_extension_config": balancer}]},
        )
        balancer = {"name": "envoy.load_balancing_policies.subset", "typed_config": refusal}
    override = typed(
        "load_balancing_policies.override_host.v3.OverrideHost",
        override_host_sources=[{"metadata": key}],
        fallback_policy={"policies": [{"typed_extension_config": balancer}]},
    )
    policy = {"name": "envoy.load_balancing_policies.override_host", "typed_config": override}
    places = {_place(replica): replica for replica in reversed(config.replicas)}
    cluster: Json = {
        "type": "STRICT_DNS",
        "load_balancing_policy": {"policies": [{"typed_extension_config": policy}]},
        "load_assignment": {
            "cluster_name": REPLICAS,
            "endpoints": [{"lb_endpoints": [_endpoint(*endpoint, places[endpoint]) for endpoint in reversed(places)]}],
        },
    }
    secured = {endpoint: replica for endpoint, replica in places.items() if endpoint[2]}
    if secured:
        cluster["transport_socket_matches"] = [_socket(endpoint, replica) for endpoint, replica in secured.items()]
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


def _socket(endpoint: tuple[str, int, bool], replica: ReplicaConfig) -> Json:
    host, port, _ = endpoint
    tls = client_tls(sni=None if is_ip_address(host) else host, ca_file=replica.ca_file or SYSTEM_CA)
    return {"name": f"{host}:{port}", "match": {"tls": f"{host}:{port}"}, "transport_socket": tls}


#: Beyond `picker.hold_s`: the way to the picker and back, and the decision.
MESSAGE_MARGIN_S = 10.0
#: Retries of a request that no reply has begun for; the picker names as many replicas behind the first.
RETRIES = 2
#: A request that no engine can have begun. The picker adds the rest by `x-envoy-retry-on` where a request may be sent
#: twice (`gorgo.picker.call`): a connection that is lost or silent before a response, and any 5xx.
_RETRY_ON = "connect-failure,refused-stream,retriable-status-codes"
#: The engine is busy, or refuses: whether another one answers the same request says whose fault that is.
_RETRIED_STATUSES = sorted({429, 503, *REFUSALS})
#: Above the 60 s of common load balancers.
_CLIENT_IDLE_S = 75.0
#: Headers of a request after the filters. The picker refuses a client's beyond `MAX_HEADERS` of `gorgo.picker.call`;
#: Envoy answers 500 where those that the picker sets do not fit.
_HEADERS = 160
#: Streams of one HTTP/2 client, and its window: a body of that size comes without a pause.
_STREAMS, _WINDOW_BYTES = 1024, 1024 * 1024

_HEAD = """\
# Envoy before `gorgo picker`, made by `gorgo picker --print-envoy`.
# Requests without a choice of the picker: {without}.
"""


def envoy_yaml(config: Config) -> str:
    """Return the configuration as YAML."""
    without = "503" if is_closed(config) else "to the replica with fewest requests"
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
        common_http_protocol_options={"idle_timeout": seconds(_CLIENT_IDLE_S), "max_headers_count": _HEADERS},
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
        # A client may not choose its replica, nor how often its request is sent.
        early_header_mutation_extensions=[_strip()],
        route_config={"name": "clients", "virtual_hosts": [_virtual_host(config)]},
        http_filters=[
            *picker_filters(config, config.picker.hold_s + MESSAGE_MARGIN_S),
            {
                "name": "envoy.filters.http.router",
                "typed_config": typed("filters.http.router.v3.Router", suppress_envoy_headers=True),
            },
        ],
        access_log=[access_log()],
    )


def _strip() -> Json:
    names = (DESTINATION, f"{DESTINATION}-subset", f"{DESTINATION}-served", "x-envoy-retry-on", "x-envoy-max-retries")
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
