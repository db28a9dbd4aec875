"""The part of Envoy's messages that the picker reads and writes, as Protocol Buffers.

Owns numbers and types of fields, from `envoy.service.ext_proc.v3`, `envoy.service.accesslog.v3`, what these import, and
grpc.health.v1. Fields that are not here are skipped. The package `xds-protos` has them all, and breaks the extra
`otel`: it puts other files in the place of `opentelemetry.proto`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from google.protobuf import struct_pb2, wrappers_pb2
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

from gorgo.core.record import record

_PACKAGE = "gorgo.picker.envoy"
_STRUCT, _UINT32 = ".google.protobuf.Struct", ".google.protobuf.UInt32Value"
_SCALARS: Final = {
    "bool": FieldDescriptorProto.TYPE_BOOL,
    "bytes": FieldDescriptorProto.TYPE_BYTES,
    "enum": FieldDescriptorProto.TYPE_INT32,  # the same bytes
    "string": FieldDescriptorProto.TYPE_STRING,
    "uint32": FieldDescriptorProto.TYPE_UINT32,
}


@record
class Field:
    """One field of a message.

    Parameters
    ----------
    number:
        Its number on the wire.
    type:
        A scalar, the name of a message here, or one of Google's with its package and a dot before it.
    repeated, is_map:
        It may come often; it is a map from texts to this type.
    oneof:
        The choice that it belongs to.
    """

    number: int
    type: str
    repeated: bool = False
    is_map: bool = False
    oneof: str | None = None


def _phases(first: int, headers: str, body: str, trailers: str, *, oneof: str) -> dict[str, Field]:
    """Return the six phases of an exchange, numbered from `first` on."""
    kinds = {
        "request_headers": headers,
        "response_headers": headers,
        "request_body": body,
        "response_body": body,
        "request_trailers": trailers,
        "response_trailers": trailers,
    }
    return {name: Field(number, kind, oneof=oneof) for number, (name, kind) in enumerate(kinds.items(), first)}


_RESPONSE_FLAGS = {
    "no_healthy_upstream": 2,
    "upstream_request_timeout": 3,
    "local_reset": 4,
    "upstream_remote_reset": 5,
    "upstream_connection_failure": 6,
    "upstream_connection_termination": 7,
    "upstream_overflow": 8,
    "no_route_found": 9,
    "downstream_connection_termination": 15,
    "upstream_retry_limit_exceeded": 16,
    "stream_idle_timeout": 17,
    "downstream_protocol_error": 19,
    "upstream_max_stream_duration_reached": 20,
    "duration_timeout": 23,
    "upstream_protocol_error": 24,
    "overload_manager": 26,
    "dns_resolution_failure": 27,
    "downstream_remote_reset": 28,
}

MESSAGES: Final[Mapping[str, Mapping[str, Field]]] = {
    "HeaderValue": {"key": Field(1, "string"), "value": Field(2, "string"), "raw_value": Field(3, "bytes")},
    "HeaderMap": {"headers": Field(1, "HeaderValue", repeated=True)},
    "HeaderValueOption": {"header": Field(1, "HeaderValue"), "append_action": Field(3, "enum")},
    "Metadata": {"filter_metadata": Field(1, _STRUCT, is_map=True)},
    "HttpHeaders": {"headers": Field(1, "HeaderMap"), "end_of_stream": Field(3, "bool")},
    "HttpBody": {"body": Field(1, "bytes"), "end_of_stream": Field(2, "bool")},
    "HttpTrailers": {"trailers": Field(1, "HeaderMap")},
    "ProtocolConfiguration": {"request_body_mode": Field(1, "enum"), "response_body_mode": Field(2, "enum")},
    "ProcessingRequest": {
        **_phases(2, "HttpHeaders", "HttpBody", "HttpTrailers", oneof="request"),
        "metadata_context": Field(8, "Metadata"),
        "attributes": Field(9, _STRUCT, is_map=True),
        "observability_mode": Field(10, "bool"),
        "protocol_config": Field(11, "ProtocolConfiguration"),
    },
    "HeaderMutation": {
        "set_headers": Field(1, "HeaderValueOption", repeated=True),
        "remove_headers": Field(2, "string", repeated=True),
    },
    "StreamedBodyResponse": {"body": Field(1, "bytes"), "end_of_stream": Field(2, "bool")},
    "BodyMutation": {
        "body": Field(1, "bytes", oneof="mutation"),
        "clear_body": Field(2, "bool", oneof="mutation"),
        "streamed_response": Field(3, "StreamedBodyResponse", oneof="mutation"),
    },
    "CommonResponse": {
        "header_mutation": Field(2, "HeaderMutation"),
        "body_mutation": Field(3, "BodyMutation"),
        "clear_route_cache": Field(5, "bool"),
    },
    "HeadersResponse": {"response": Field(1, "CommonResponse")},
    "BodyResponse": {"response": Field(1, "CommonResponse")},
    "TrailersResponse": {"header_mutation": Field(1, "HeaderMutation")},
    "HttpStatus": {"code": Field(1, "enum")},
    "ImmediateResponse": {
        "status": Field(1, "HttpStatus"),
        "headers": Field(2, "HeaderMutation"),
        "body": Field(3, "bytes"),
        "details": Field(5, "string"),
    },
    "ProcessingResponse": {
        **_phases(1, "HeadersResponse", "BodyResponse", "TrailersResponse", oneof="response"),
        "immediate_response": Field(7, "ImmediateResponse", oneof="response"),
        "dynamic_metadata": Field(8, _STRUCT),
    },
    "SocketAddress": {"address": Field(2, "string"), "port_value": Field(3, "uint32")},
    "Address": {"socket_address": Field(1, "SocketAddress")},
    "ResponseFlags": {name: Field(number, "bool") for name, number in _RESPONSE_FLAGS.items()},
    "AccessLogCommon": {
        "upstream_remote_address": Field(13, "Address"),
        "response_flags": Field(16, "ResponseFlags"),
        "metadata": Field(17, "Metadata"),
        "custom_tags": Field(22, "string", is_map=True),
        "intermediate_log_entry": Field(27, "bool"),
    },
    "HTTPResponseProperties": {
        "response_code": Field(1, _UINT32),
        "response_headers": Field(4, "string", is_map=True),
        "response_code_details": Field(6, "string"),
    },
    "HTTPAccessLogEntry": {
        "common_properties": Field(1, "AccessLogCommon"),
        "response": Field(4, "HTTPResponseProperties"),
    },
    "HTTPAccessLogEntries": {"log_entry": Field(1, "HTTPAccessLogEntry", repeated=True)},
    "StreamAccessLogsMessage": {"http_logs": Field(2, "HTTPAccessLogEntries")},
    "HealthCheckRequest": {"service": Field(1, "string")},
    "HealthCheckResponse": {"status": Field(1, "enum")},
}


def message_classes() -> dict[str, Any]:
    """Return a class for each message, in a pool of their own: no other package's messages are in the way."""
    pool = DescriptorPool()
    file = FileDescriptorProto(name="gorgo_picker.proto", package=_PACKAGE, syntax="proto3")
    for imported in (struct_pb2, wrappers_pb2):
        pool.AddSerializedFile(imported.DESCRIPTOR.serialized_pb)
        file.dependency.append(imported.DESCRIPTOR.name)
    for name, fields in MESSAGES.items():
        _add_message(file.message_type.add(name=name), name, fields)
    pool.AddSerializedFile(file.SerializeToString())
    return {name: GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in MESSAGES}


def _add_message(message: DescriptorProto, name: str, fields: Mapping[str, Field]) -> None:
    oneofs: dict[str, int] = {}
    for key, each in fields.items():
        added = message.field.add(name=key, number=each.number)
        added.label = added.LABEL_REPEATED if each.repeated or each.is_map else added.LABEL_OPTIONAL
        if each.is_map:
            entry = message.nested_type.add(name="".join(part.capitalize() for part in key.split("_")) + "Entry")
            entry.options.map_entry = True
            for number, (side, kind) in enumerate((("key", "string"), ("value", each.type)), 1):
                _set_type(entry.field.add(name=side, number=number, label=added.LABEL_OPTIONAL), kind)
            _set_type(added, f".{_PACKAGE}.{name}.{entry.name}")
        else:
            _set_type(added, each.type)
        if each.oneof is not None:
            if each.oneof not in oneofs:
                oneofs[each.oneof] = len(message.oneof_decl)
                message.oneof_decl.add(name=each.oneof)
            added.oneof_index = oneofs[each.oneof]


def _set_type(added: FieldDescriptorProto, kind: str) -> None:
    if kind in _SCALARS:
        added.type = _SCALARS[kind]
    else:
        added.type = added.TYPE_MESSAGE
        added.type_name = kind if kind.startswith(".") else f".{_PACKAGE}.{kind}"
