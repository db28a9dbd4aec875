"""Envoy's messages, of the extra `picker`: the one place that imports its packages."""

from __future__ import annotations

from gorgo.errors import MissingExtra

try:
    from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue, HeaderValueOption
    from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
    from envoy.service.accesslog.v3.als_pb2 import StreamAccessLogsMessage
    from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse
    from google.protobuf.message import DecodeError
    from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
except ImportError as error:
    raise MissingExtra("the endpoint picker needs the extra: pip install 'gorgo-router[picker]'") from error

__all__ = [
    "DecodeError",
    "HeaderMap",
    "HeaderValue",
    "HeaderValueOption",
    "HealthCheckRequest",
    "HealthCheckResponse",
    "ProcessingMode",
    "ProcessingRequest",
    "ProcessingResponse",
    "StreamAccessLogsMessage",
]
