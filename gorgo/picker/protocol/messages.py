"""Messages of a call as they come: bytes to a message, its headers to the project's list, its metadata to names.

Owns what breaks the protocol, the heads of requests with the message that begins a call (`HeadReader`), and
`CallOutput`, what a call needs of its transport. Leaves answers to `gorgo.picker.protocol.answers` and the order of
messages to the calls.

Theory of operation. Clients send most of their headers again and again, so a head is read once for all requests that
repeat it. The message is split by its lengths; a header that came before is known by its bytes, and what is found in a
head (`HeaderFindings`) is known by the headers that do not vary. A message that has another form than Envoy's is left
to the library of Protocol Buffers, which also reads each header when it comes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, Protocol, TypeVar

from gorgo.core.record import record
from gorgo.live.http.headers import Header, HeaderFindings, RequestHeaders
from gorgo.picker.protocol.protos import DecodeError, HeaderValue, ProcessingMode, ProcessingRequest

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
    status_field = None if fields is None else fields.get(STATUS)
    number = 0.0 if status_field is None else status_field.number_value
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
    entry = metadata.get(namespace)
    return None if entry is None else entry.fields


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


K = TypeVar("K")
V = TypeVar("V")
#: Headers that differ each time. Nothing is found in them, none is withheld from a replica unless `connection` says
#: so, and they stand behind the others.
VARYING = frozenset({b"content-length", b"traceparent", b"tracestate", b"x-forwarded-for", b"x-request-id"})
#: Heads, headers and ends of messages that are known: clients' libraries times their keys. All go when there are more.
MAX_KNOWN = 1024
#: Longest head that is retained; and longest header, and end of a message.
MAX_HEAD_BYTES, MAX_PART_BYTES = 4096, 512
#: Tags: the first field of a message, and `request_headers` in a `ProcessingRequest`.
_FIRST, _REQUEST_HEADERS = 0x0A, b"\x12"
#: Whether a request has ended, by what follows its headers.
_ENDED = {b"": False, b"\x18\x00": False, b"\x18\x01": True}

_parse_header = HeaderValue.FromString
_parse_message = ProcessingRequest.FromString


@dataclass(slots=True)
class RequestHead:
    """The head of a request. `path` has no query, `headers` no pseudo headers."""

    method: str
    path: str
    headers: list[Header]
    #: Those of `headers` that differ each time.
    varying: list[Header]
    #: It has no body.
    ended: bool
    #: Names of headers that were for the picker alone.
    removed: tuple[bytes, ...] = ()


@record
class CallMode:
    """How a gateway calls: as it sends both bodies, and among which addresses it lets a picker choose."""

    request_body: int
    response_body: int
    #: `None`: among all.
    subset: list[str] | None


@record
class RequestStart:
    """What begins the call of a request."""

    head: RequestHead
    mode: CallMode


@record
class _KnownHead:
    method: str
    path: str
    headers: list[Header]
    findings: HeaderFindings


class HeadReader:
    """Reads what begins the calls of requests.

    Example
    -------
    >>> message = ProcessingRequest()
    >>> for name, value in ((":method", "POST"), (":path", "/v1/chat/completions?x"), ("x-request-id", "7")):
    ...     _ = message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    >>> head = HeadReader().read(message.SerializeToString()).head
    >>> head.method, head.path, head.headers
    ('POST', '/v1/chat/completions', [(b'x-request-id', b'7')])
    """

    __slots__ = ("_headers", "_heads", "_modes")

    def __init__(self) -> None:
        self._headers: dict[bytes, Header] = {}
        self._heads: dict[tuple[Header, ...], _KnownHead] = {}
        self._modes: dict[bytes, CallMode] = {}

    def read(self, message: bytes) -> RequestStart | None:
        """Return what begins a request; `None` for another message, or another form. Raises `ProtocolError`."""
        if message[:1] != _REQUEST_HEADERS:
            return None
        try:
            size, position = length_at(message, 1)
            end = position + size
            if message[position] != _FIRST:
                return None
            size, position = length_at(message, position + 1)
            headers_end = position + size
            split = self._split(message, position, headers_end)
            mode = self._mode(message[end:])
        except (IndexError, DecodeError):
            return None
        ended = _ENDED.get(message[headers_end:end]) if headers_end <= end <= len(message) else None
        if split is None or mode is None or ended is None:
            return None
        stable, varying = split
        return RequestStart(self._head(stable, varying, ended=ended), mode)

    def read_parsed(self, message: Any) -> RequestStart:
        """Return what begins a request by a `ProcessingRequest`. Raises `ProtocolError`."""
        stable: list[Header] = []
        varying: list[Header] = []
        for pair in map(_header, message.request_headers.headers.headers):
            (varying if pair[0] in VARYING else stable).append(pair)
        head = self._head(stable, varying, ended=message.request_headers.end_of_stream)
        return RequestStart(head, _mode_of(message))

    def _split(self, message: bytes, position: int, end: int) -> tuple[list[Header], list[Header]] | None:
        """Return the headers of a `HeaderMap`, and those that differ each time."""
        stable: list[Header] = []
        varying: list[Header] = []
        pairs = self._headers
        while position < end:
            if message[position] != _FIRST:
                return None
            size = message[position + 1]
            position += 2
            if size > 127:
                size, position = length_at(message, position - 1)
            part = message[position : position + size]
            position += size
            pair = pairs.get(part)
            if pair is None:
                pair = _header(_parse_header(part))
                if pair[0] in VARYING:
                    varying.append(pair)
                    continue
                if size <= MAX_PART_BYTES:
                    _retain(pairs, part, pair)
            stable.append(pair)
        return (stable, varying) if position == end else None

    def _head(self, stable: list[Header], varying: list[Header], *, ended: bool) -> RequestHead:
        key = tuple(stable)
        head = self._heads.get(key)
        if head is None:
            head = _known(stable)
            if sum(len(name) + len(value) for name, value in stable) <= MAX_HEAD_BYTES:
                _retain(self._heads, key, head)
        headers = RequestHeaders(head.headers, head.findings)
        headers += varying
        return RequestHead(head.method, head.path, headers, varying, ended)

    def _mode(self, rest: bytes) -> CallMode | None:
        """Return the mode by what follows the headers; `None` where that has headers, or another phase, too."""
        mode = self._modes.get(rest)
        if mode is None:
            message = _parse_message(rest)
            if message.WhichOneof("request") is not None:
                return None
            mode = _mode_of(message)
            if len(rest) <= MAX_PART_BYTES:
                _retain(self._modes, rest, mode)
        return mode


def _retain(cache: dict[K, V], key: K, value: V) -> None:
    if len(cache) >= MAX_KNOWN:
        cache.clear()
    cache[key] = value


def _header(pair: Any) -> Header:
    return pair.key.encode(), pair.raw_value or pair.value.encode()


def _known(stable: Iterable[Header]) -> _KnownHead:
    """Return what is known of a head. Raises `ProtocolError` without a method or a path."""
    method = path = b""
    headers: list[Header] = []
    for name, value in stable:
        if name[:1] != b":":
            headers.append((name, value))
        elif name == b":method":
            method = value
        elif name == b":path":
            path = value
    if not method or not path:
        raise ProtocolError("expected the headers :method and :path")
    route = path.split(b"?", 1)[0]
    return _KnownHead(method.decode("latin-1"), route.decode("latin-1"), headers, HeaderFindings())


def _mode_of(message: Any) -> CallMode:
    """Return the mode of a call by its first message. Raises `ProtocolError`."""
    if message.observability_mode:
        raise ProtocolError("expected a filter that waits for its answers: observability_mode chooses nothing")
    config = message.protocol_config
    request_body = config.request_body_mode if message.HasField("protocol_config") else BUFFERED
    return CallMode(request_body, config.response_body_mode, read_subset(message))


def length_at(message: bytes, position: int) -> tuple[int, int]:
    """Return a length below 2^21, and the position behind it. Raises `IndexError` for any other.

    >>> length_at(bytes([0xF0, 0xA2, 0x04]), 0)
    (70000, 3)
    """
    first = message[position]
    if first < 128:
        return first, position + 1
    second = message[position + 1]
    if second < 128:
        return first & 127 | second << 7, position + 2
    third = message[position + 2]
    if third > 127:
        raise IndexError("a longer number")
    return first & 127 | (second & 127) << 7 | third << 14, position + 3
