"""Heads of requests, with the message that begins a call: read once for all requests that repeat them.

Theory of operation. Clients send most of their headers again and again. The message is split by its lengths; a header
that came before is known by its bytes, and what is found in a head (`HeaderFindings`) is known by the headers that do
not vary. A message that has another form than Envoy's is left to the library of Protocol Buffers, which also reads each
header when it comes first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from gorgo.core.record import record
from gorgo.live.http.headers import Header, HeaderFindings, RequestHeaders
from gorgo.picker.protocol.messages import BUFFERED, ProtocolError, read_subset
from gorgo.picker.protocol.protos import DecodeError, HeaderValue, ProcessingRequest
from gorgo.picker.protocol.wire import length_at

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
            found = self._split(message, position, headers_end)
            mode = self._mode(message[end:])
        except (IndexError, DecodeError):
            return None
        ended = _ENDED.get(message[headers_end:end]) if headers_end <= end <= len(message) else None
        if found is None or mode is None or ended is None:
            return None
        stable, varying = found
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
        known = self._headers
        while position < end:
            if message[position] != _FIRST:
                return None
            size = message[position + 1]
            position += 2
            if size > 127:
                size, position = length_at(message, position - 1)
            part = message[position : position + size]
            position += size
            pair = known.get(part)
            if pair is None:
                pair = _header(_parse_header(part))
                if pair[0] in VARYING:
                    varying.append(pair)
                    continue
                if size <= MAX_PART_BYTES:
                    _retain(known, part, pair)
            stable.append(pair)
        return (stable, varying) if position == end else None

    def _head(self, stable: list[Header], varying: list[Header], *, ended: bool) -> RequestHead:
        key = tuple(stable)
        known = self._heads.get(key)
        if known is None:
            known = _known(stable)
            if sum(len(name) + len(value) for name, value in stable) <= MAX_HEAD_BYTES:
                _retain(self._heads, key, known)
        headers = RequestHeaders(known.headers, known.findings)
        headers += varying
        return RequestHead(known.method, known.path, headers, varying, ended)

    def _mode(self, rest: bytes) -> CallMode | None:
        """Return the mode by what follows the headers; `None` where that has headers, or another phase, too."""
        found = self._modes.get(rest)
        if found is None:
            message = _parse_message(rest)
            if message.WhichOneof("request") is not None:
                return None
            found = _mode_of(message)
            if len(rest) <= MAX_PART_BYTES:
                _retain(self._modes, rest, found)
        return found


def _retain(known: dict[K, V], key: K, value: V) -> None:
    if len(known) >= MAX_KNOWN:
        known.clear()
    known[key] = value


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
