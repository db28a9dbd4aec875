"""Messages of a call as they come: bytes to a message, its headers to the project's list, its metadata to names.

Owns what breaks the protocol, and `CallOutput`, what a call needs of its transport. Leaves answers to
`gorgo.picker.protocol.answers` and the order of messages to the calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from ipaddress import ip_address
from typing import Any, Protocol

from gorgo.core.record import record
from gorgo.live.http.headers import Header
from gorgo.picker.protocol.protos import DecodeError, ProcessingMode, ProcessingRequest

BUFFERED = ProcessingMode.BUFFERED
FULL_DUPLEX_STREAMED = ProcessingMode.FULL_DUPLEX_STREAMED

#: Header of the choice, `ip:port[,ip:port...]`; and of the address that served in the end.
DESTINATION = "x-gateway-destination-endpoint"
SERVED = f"{DESTINATION}-served"
_SUBSET = f"{DESTINATION}-subset"
#: Namespaces of Envoy's dynamic metadata: the choice, this picker's id of the exchange, the gateway's hint.
LB, OWN, _HINT = "envoy.lb", "epp", "envoy.lb.subset_hint"
#: In the own namespace: the statuses by which Envoy's tries of one request failed, in their order.
TRIED = "tried"
#: Namespace of what Envoy's script leaves of an answer: the counts of tokens; or all of a short one in one piece, as
#: text in base 64.
USAGE, BODY = "usage", "body"
#: Attributes of a response, and under which name they come.
SERVED_BY, STATUS, _FILTER = "upstream.address", "response.code", "envoy.filters.http.ext_proc"
#: Addresses of one hint that are read: more replicas than a pool has.
MAX_SUBSET = 16_384

_parse = ProcessingRequest.FromString


class ProtocolError(Exception):
    """A message that the protocol does not allow. The text says what was expected."""


def read_message(message: bytes) -> Any:
    """Return a `ProcessingRequest`. Raises `ProtocolError`."""
    try:
        return _parse(message)
    except DecodeError:
        raise ProtocolError("expected a serialized ProcessingRequest") from None


def read_headers(message: Any) -> list[Header]:
    """Return the headers of an `HttpHeaders`, names in lower case as Envoy sends them."""
    return [(pair.key.encode(), pair.raw_value or pair.value.encode()) for pair in message.headers.headers]


def read_status(headers: Iterable[Header]) -> int:
    """Return the status of a response; 0 without one."""
    value = next((value for name, value in headers if name == b":status"), b"")
    return int(value) if value.isdigit() and len(value) == 3 else 0


def metadata_text(message: Any, namespace: str, key: str) -> str | None:
    """Return a text of the dynamic metadata that came with a message; `None` without it."""
    if not message.HasField("metadata_context"):
        return None
    return text_of(fields_of(message.metadata_context.filter_metadata, namespace), key)


@record
class ServedBy:
    """Who has answered in the end: its address, its status, and the statuses of the tries that failed."""

    address: str
    status: int = 0
    tried: tuple[int, ...] = ()


def read_served(message: Any) -> tuple[ServedBy | None, int]:
    """Return who has answered, as far as the message says, and the status, else `None` and 0."""
    fields = fields_of(message.attributes, _FILTER)
    address = text_of(fields, SERVED_BY) or metadata_text(message, LB, SERVED)
    found = None if fields is None else fields.get(STATUS)
    number = 0.0 if found is None else found.number_value
    status = int(number) if 0 <= number < 600 else 0
    if not address:
        return None, status
    return ServedBy(address, status, read_tried(metadata_text(message, OWN, TRIED))), status


def read_tried(text: str | None) -> tuple[int, ...]:
    """Return the statuses of tries by Envoy's list of them.

    >>> read_tried("401,503"), read_tried(None)
    ((401, 503), ())
    """
    return () if text is None else tuple(int(each) for each in text.split(",") if each.isdigit() and len(each) == 3)


def fields_of(metadata: Mapping[str, Any], namespace: str) -> Any:
    """Return the fields of a namespace of Envoy's metadata; `None` without it."""
    found = metadata.get(namespace)
    return None if found is None else found.fields


def text_of(fields: Any, key: str) -> str | None:
    """Return a text of such fields; `None` without it."""
    value = None if fields is None else fields.get(key)
    return None if value is None else value.string_value or None


def read_subset(message: Any) -> list[str] | None:
    """Return the addresses among which the gateway lets a picker choose; `None` without such a hint."""
    if not message.HasField("metadata_context"):
        return None
    metadata = message.metadata_context.filter_metadata
    if _HINT not in metadata or _SUBSET not in metadata[_HINT].fields:
        return None
    hint = metadata[_HINT].fields[_SUBSET]
    if hint.WhichOneof("kind") == "list_value":
        texts = [value.string_value for value in hint.list_value.values[:MAX_SUBSET]]
    else:
        texts = hint.string_value.split(",", MAX_SUBSET)[:MAX_SUBSET]
    return [text.strip() for text in texts if text.strip()]


def peer_of(headers: Iterable[Header]) -> tuple[str, int] | None:
    """Return the client's address as Envoy appended it last; `None` without it or with something else."""
    forwarded = [value for name, value in headers if name == b"x-forwarded-for"]
    if not forwarded:
        return None
    try:
        return str(ip_address(forwarded[-1].rsplit(b",", 1)[-1].strip().decode("latin-1"))), 0
    except ValueError:
        return None


class CallOutput(Protocol):
    """The transport's end of one call."""

    def send_message(self, message: bytes) -> None:
        """Send one serialized `ProcessingResponse`. Never waits."""
        ...

    def end_call(self) -> None:
        """End the call with status OK."""
        ...
