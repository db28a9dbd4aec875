"""Envoy's messages, of the extra `picker`: the one place that imports its packages.

Owns the classes of the messages in `envoy.proto`, which is for readers; `envoy.binpb` is what they are made from. A
generated module would be bound to one major version of protobuf, and the extra `otel` has bounds of its own. The
package `xds-protos` has all messages of Envoy, and puts another file in the place of `opentelemetry.proto`.
"""

from __future__ import annotations

from enum import IntEnum
from importlib.resources import files
from typing import Any

from gorgo.errors import MissingExtra

try:
    from google.protobuf import struct_pb2, wrappers_pb2
    from google.protobuf.descriptor_pb2 import FileDescriptorSet
    from google.protobuf.descriptor_pool import DescriptorPool
    from google.protobuf.message import DecodeError
    from google.protobuf.message_factory import GetMessageClass
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


def _message_classes() -> dict[str, Any]:
    """Return a class for each message, in a pool of their own: no other package's messages are in the way."""
    pool = DescriptorPool()
    for imported in (struct_pb2, wrappers_pb2):
        pool.AddSerializedFile(imported.DESCRIPTOR.serialized_pb)
    (file,) = FileDescriptorSet.FromString(files(__package__).joinpath("envoy.binpb").read_bytes()).file
    pool.AddSerializedFile(file.SerializeToString())
    names = [message.name for message in file.message_type]
    return {name: GetMessageClass(pool.FindMessageTypeByName(f"{file.package}.{name}")) for name in names}


_CLASSES = _message_classes()
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
