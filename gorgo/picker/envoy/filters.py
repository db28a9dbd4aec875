"""Envoy's HTTP filters before a picker, and its access log.

1. `envoy.filters.http.ext_proc`: the decision. Envoy buffers the request's body, and the call stays open until the
   exchange ends: its end releases the replica's load. A picker that dies cuts no reply.
2. `first`: one message to the picker at the first chunk of each reply, for which no chunk waits.
3. `envoy.filters.http.lua`: the engine's count of tokens, for the access log (`usage`).
4. The access log: reason, durations and usage, batched.
"""

from __future__ import annotations

from gorgo.picker.envoy.types import Json, seconds, typed
from gorgo.picker.envoy.usage import usage_filter
from gorgo.picker.protocol.messages import SERVED_BY, STATUS

#: Cluster of the picker.
PICKER = "picker"
#: Namespaces of Envoy's dynamic metadata: the choice; the picker's own.
LB, OWN = "envoy.lb", "epp"
#: Of entries of the access log.
LOG_NAME, FIRST_BODY_TAG = "epp", "first_body_us"
_FIRST_BODY = "%COMMON_DURATION(DS_RX_BEG:US_RX_BODY_BEG:us)%"
#: Delay of an entry, s. One message has all entries of it.
_FLUSH_S = 0.05


def picker_filters(message_timeout_s: float) -> list[Json]:
    """Return the filters before the router's."""
    return [_decision(message_timeout_s), _first_token(message_timeout_s), usage_filter()]


def access_log() -> Json:
    """Return the access log by gRPC."""
    common = {
        "log_name": LOG_NAME,
        "transport_api_version": "V3",
        "buffer_flush_interval": seconds(_FLUSH_S),
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
    return {"name": "first", "typed_config": config}
