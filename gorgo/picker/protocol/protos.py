"""Envoy's messages, of the extra `picker`: the one place that imports its packages."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from gorgo.errors import MissingExtra

try:
    from google.protobuf.message import DecodeError

    from gorgo.picker.protocol.schema import message_classes
except ImportError as error:
    raise MissingExtra("the endpoint picker needs the extra: pip install 'gorgo-router[picker]'") from error

__all__ = [
    "OVERWRITE_IF_EXISTS_OR_ADD",
    "DecodeError",
    "HeaderValue",
    "HealthCheckRequest",
    "HealthCheckResponse",
    "ProcessingMode",
    "ProcessingRequest",
    "ProcessingResponse",
    "ServingStatus",
    "StreamAccessLogsMessage",
]

_CLASSES = message_classes()
HealthCheckRequest: Any = _CLASSES["HealthCheckRequest"]
HealthCheckResponse: Any = _CLASSES["HealthCheckResponse"]
HeaderValue: Any = _CLASSES["HeaderValue"]
ProcessingRequest: Any = _CLASSES["ProcessingRequest"]
ProcessingResponse: Any = _CLASSES["ProcessingResponse"]
StreamAccessLogsMessage: Any = _CLASSES["StreamAccessLogsMessage"]

#: `HeaderValueOption.HeaderAppendAction`: the picker's value replaces the client's.
OVERWRITE_IF_EXISTS_OR_ADD = 2


class ServingStatus(IntEnum):
    """What a health check answers (`HealthCheckResponse.ServingStatus`)."""

    SERVING = 1
    NOT_SERVING = 2
    SERVICE_UNKNOWN = 3


class ProcessingMode(IntEnum):
    """How Envoy sends a body (`ProcessingMode.BodySendMode`)."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX_STREAMED = 4
    GRPC = 5
