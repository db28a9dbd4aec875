"""Filters of headers in both directions: hop-by-hop headers end here, and only the Router chooses a replica.

Owns the filters, and the headers of a request with what was found in them (`RequestHeaders`). Names of requests are in
lower case (ASGI's rule), names of responses in any case. Duplicates and order are preserved; the length of a response
comes last.
"""

from __future__ import annotations

import random
import re
from collections.abc import Container, Iterable, Sequence
from functools import lru_cache
from typing import Any

from gorgo.core.record import record

Header = tuple[bytes, bytes]

#: Headers of clients' keys; removed when the replica has its own key.
KEYS = frozenset({b"authorization", b"x-api-key", b"api-key"})

#: Headers of a request that a replica gets. Others could choose a worker, a rank, a host or a priority behind the
#: proxy, and each engine and gateway has its own; `proxy.pass_headers` adds to these.
FORWARDED = KEYS | {
    *(b"accept", b"accept-language", b"cache-control", b"content-type"),
    *(b"date", b"idempotency-key", b"user-agent"),
    *(b"baggage", b"b3", b"traceparent", b"tracestate", b"uber-trace-id", b"x-amzn-trace-id"),
    *(b"x-client-request-id", b"x-cloud-trace-context", b"x-correlation-id"),
    *(b"x-llm-d-slo-tpot-ms", b"x-llm-d-slo-ttft-ms", b"x-slo-tpot-ms", b"x-slo-ttft-ms"),
}
FORWARDED_PREFIXES = (b"anthropic-", b"openai-", b"x-b3-", b"x-datadog-", b"x-stainless-")

#: Headers of a response that a client gets. Others speak to the hop behind the proxy (`x-accel-redirect`, `set-cookie`,
#: `www-authenticate`) or about the replica's own address (`location`, `alt-svc`).
RETURNED = frozenset(
    {
        *(b"age", b"cache-control", b"content-disposition", b"content-encoding", b"content-language"),
        *(b"content-length", b"content-type", b"date", b"etag", b"expires", b"last-modified", b"pragma"),
        *(b"ratelimit", b"ratelimit-policy", b"request-id", b"retry-after", b"server-timing", b"vary"),
        *(b"x-model", b"x-process-time", b"x-should-retry"),
    }
)
RETURNED_PREFIXES = (b"anthropic-", b"openai-", b"ratelimit-", b"x-ratelimit-")

#: A name in lower case that the grammar allows. A replica's header with another name is left out.
NAME = re.compile(rb"[-!#$%&'*+.^_`|~0-9a-z]+")
#: Bytes that no line of a head may contain, CR and LF aside: some readers end a line there.
CONTROLS = bytes(byte for byte in (*range(32), 127) if byte not in b"\t\r\n")
#: A body's length: at most 64 bits.
LENGTH = re.compile(rb"[0-9]{1,19}")
_LENGTH = b"content-length"
_LENGTH_SIZE = len(_LENGTH)
_ENCODING = b"content-encoding"
#: What a replica is asked for whatever the client accepts: of a compressed answer neither the first token nor the usage
#: is seen, and an engine's library may withhold events until it has enough to compress.
IDENTITY: Header = (b"accept-encoding", b"identity")
#: Not forwarded though an operator passes them: a body is sent on unpacked, and asked for unpacked.
_NOT_FORWARDED = frozenset({_ENCODING, IDENTITY[0]})
_ENCODING_SIZE = len(_ENCODING)
_NOT_CODED = (b"", b"identity")
_VALUE = re.compile(rb"(?:[^\x00-\x20\x7f]+(?:[ \t]+[^\x00-\x20\x7f]+)*)?")

#: Headers in which clients name their session, most specific first (see the conventions of other routers).
SESSION_HEADERS = (b"x-session-id", b"x-dynamo-session-id", b"x-smg-routing-key", b"x-session-token")

#: An id that is safe in logs, headers and URLs.
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:@+=-]{1,128}")
#: Ids need to be unique, not secret, so the system's random source only seeds them.
_IDS = random.Random()
#: Longer session keys are cut: they are only compared.
_SESSION_BYTES = 256


def request_id(headers: Iterable[Header]) -> str:
    """Return the client's own id if it is safe to repeat, else a new one."""
    return own_request_id(headers) or new_id()


def own_request_id(headers: Iterable[Header]) -> str | None:
    """Return the client's own id if it is safe to repeat."""
    for name, value in headers:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return value.decode("ascii")
    return None


def new_id() -> str:
    """Return a unique random id."""
    return f"{_IDS.getrandbits(128):032x}"


def session_id(headers: Iterable[Header]) -> str | None:
    """Return the client's session key; None without one."""
    best = len(SESSION_HEADERS)
    session: bytes | None = None
    for name, value in headers:
        if name in _SESSIONS and _SESSIONS[name] < best and value:
            best, session = _SESSIONS[name], value
    return None if session is None else session[:_SESSION_BYTES].decode("latin-1")


def upstream_headers(
    headers: Sequence[Header], *, request_id: str | None, api_key: str | None, passed: Container[bytes] = ()
) -> list[Header]:
    """Return the headers for the replica. Its own key replaces the client's; without one the client's passes.

    Answers are asked for as they are, without a compression.

    `passed` has the names that an operator allows beside `FORWARDED`. Without a `request_id` none is added.
    """
    dropped = _named_in_connection(headers) | _NOT_FORWARDED
    forwarded = [
        (name, value)
        for name, value in headers
        if (name in FORWARDED or name in _SESSIONS or name.startswith(FORWARDED_PREFIXES) or name in passed)
        and name not in dropped
        # Some servers read an underscore as a hyphen, and the name would be another one.
        and b"_" not in name
    ]
    forwarded.append(IDENTITY)
    if request_id is not None:
        forwarded.append((b"x-request-id", request_id.encode("ascii")))
    if api_key is not None:
        forwarded = [pair for pair in forwarded if pair[0] not in KEYS]
        forwarded.append((b"authorization", b"Bearer " + api_key.encode("latin-1")))
    return forwarded


def downstream_headers(headers: Sequence[Header], *, passed: Container[bytes] = ()) -> list[Header]:
    """Return the headers for the client, names in lower case.

    `passed` has the names that an operator allows beside `RETURNED`.
    """
    lowered = [(name.lower(), value.strip(b" \t")) for name, value in headers]
    dropped = _named_in_connection(lowered)
    return [
        (name, value)
        for name, value in lowered
        if (name in RETURNED or name.startswith(RETURNED_PREFIXES) or name in passed)
        and name not in dropped
        and NAME.fullmatch(name)
        and _VALUE.fullmatch(value)
    ]


def encode_lines(headers: Sequence[Header]) -> bytes:
    """Return headers as lines. Raises `ValueError` for a control character, which could make two requests of one.

    The listener refuses these too. A second check, since a head that reads as two requests is an attack.
    """
    parts: list[bytes] = []
    for name, value in headers:
        parts += (name, b": ", value, b"\r\n")
    lines = b"".join(parts)
    count = len(headers)
    if lines.count(b"\n") != count or lines.count(b"\r") != count or len(lines.translate(None, CONTROLS)) != len(lines):
        raise ValueError("a control character in a header")
    return lines


def find(headers: Iterable[Header], header: bytes) -> bytes | None:
    """Return the first value of a header, by its lower-case name."""
    size = len(header)
    for name, value in headers:
        if len(name) == size and name.lower() == header:
            return value
    return None


def has_body(headers: Iterable[Header]) -> bool:
    """Return whether a request with these headers has a body."""
    return any(name == b"transfer-encoding" or (name == b"content-length" and value != b"0") for name, value in headers)


def is_event_stream(headers: Sequence[Header]) -> bool:
    kind = find(headers, b"content-type")
    return kind is not None and kind.lstrip().lower().startswith(b"text/event-stream")


def is_json_type(headers: Sequence[Header]) -> bool:
    kind = find(headers, b"content-type")
    return kind is not None and kind.partition(b";")[0].strip().lower() == b"application/json"


def is_encoded(headers: Sequence[Header]) -> bool:
    """Return whether a coding other than `identity` applies."""
    for name, value in headers:
        # Most names differ in length, and the comparison is made for each header of each message.
        if len(name) == _ENCODING_SIZE and name.lower() == _ENCODING and value.strip().lower() not in _NOT_CODED:
            return True
    return False


def _named_in_connection(headers: Iterable[Header]) -> frozenset[bytes]:
    """Return the headers that `Connection` makes hop-by-hop; empty for nearly every request."""
    named: frozenset[bytes] = frozenset()
    for name, value in headers:
        if name == b"connection":
            named |= {token.strip().lower() for token in value.split(b",")}
    return named


_SESSIONS = {name: rank for rank, name in enumerate(SESSION_HEADERS)}


# Headers of a request, with what was found in them: found once for all requests of a connection that repeat them.
#
# Theory of operation. Most clients send the same lines on a connection again and again, and only the length of the
# body differs. The listener recognises such a head, and its headers get the findings of the one before. A finding is
# therefore never about the length. Each finding names what else it depends on, so that a reload makes it anew.


class HeaderFindings:
    """What was found in headers. `None`: not known yet."""

    __slots__ = ("admitted", "coding", "forwarded", "is_json", "options", "request_id", "session", "withheld")

    def __init__(self) -> None:
        #: The keys of clients, the name of this client, the place of its key, and findings without the key.
        self.admitted: tuple[object, str, int, HeaderFindings] | None = None
        #: The names that an operator passes, the replica's key, and the headers for a replica.
        self.forwarded: tuple[object, str | None, EncodedHeaders] | None = None
        #: The body may be read as JSON.
        self.is_json = False
        #: Its content coding, where it may; `None` for a plain one.
        self.coding: str | None = None
        #: The rules, the client, the model, and the options by them.
        self.options: tuple[object, str | None, str | None, Any] | None = None
        #: The client's own id, and its session; empty without one.
        self.request_id: str | None = None
        self.session: str | None = None
        #: The names that an operator passes, whether the replica has a key, and the names that a replica does not get.
        self.withheld: tuple[object, bool, tuple[bytes, ...]] | None = None


class RequestHeaders(list[Header]):
    """Headers of a request, names in lower case."""

    __slots__ = ("findings",)

    def __init__(self, headers: Iterable[Header], findings: HeaderFindings | None = None) -> None:
        super().__init__(headers)
        self.findings = HeaderFindings() if findings is None else findings


class EncodedHeaders(list[Header]):
    """Headers that are sent on; `lines` are the same as bytes, checked for control characters, and `length` is the one
    that they declare.
    """

    __slots__ = ("length", "lines")

    def __init__(self, headers: Iterable[Header], lines: bytes, length: int | None = None) -> None:
        super().__init__(headers)
        self.lines = lines
        self.length = length


#: Heads of responses that are remembered. A head is an engine's own for each of its addresses and routes, and another
#: one each second where it has a date.
MAX_HEADS = 1024


@record
class ResponseTraits:
    """What the headers of a response say, its length aside."""

    is_events: bool
    is_json: bool
    is_encoded: bool
    #: For the client.
    returned: EncodedHeaders


def read_response(
    headers: Iterable[Header], *, passed: frozenset[bytes] = frozenset()
) -> tuple[ResponseTraits, int | None]:
    """Return what the headers of a response say, and its declared length; `passed` as in `downstream_headers`."""
    length: int | None = None
    others: list[Header] = []
    for pair in headers:
        name, value = pair
        if len(name) == _LENGTH_SIZE and name.lower() == _LENGTH:
            length = int(value) if value.isdigit() else length
        else:
            others.append(pair)
    return _traits(tuple(others), passed), length


@lru_cache(MAX_HEADS)
def _traits(headers: tuple[Header, ...], passed: frozenset[bytes]) -> ResponseTraits:
    """Return what headers say that many responses of an engine repeat."""
    returned = downstream_headers(headers, passed=passed)
    return ResponseTraits(
        is_event_stream(headers),
        is_json_type(headers),
        is_encoded(headers),
        EncodedHeaders(returned, encode_lines(returned)),
    )


def client_headers(traits: ResponseTraits, own_headers: EncodedHeaders, length: int | None) -> EncodedHeaders:
    """Return the headers of a response for its client: the replica's, its length if it is sent on, the proxy's own."""
    returned = traits.returned
    if length is None:
        return EncodedHeaders((*returned, *own_headers), returned.lines + own_headers.lines)
    digits = b"%d" % length
    lines = b"%b%bcontent-length: %b\r\n" % (returned.lines, own_headers.lines, digits)
    return EncodedHeaders((*returned, *own_headers, (_LENGTH, digits)), lines, length)


def request_id_of(headers: Sequence[Header]) -> str:
    """Return the client's own id if it is safe to repeat, else a new one."""
    if not isinstance(headers, RequestHeaders):
        return own_request_id(headers) or new_id()
    client_id = headers.findings.request_id
    if client_id is None:
        client_id = headers.findings.request_id = own_request_id(headers) or ""
    return client_id or new_id()


def session_of(headers: Sequence[Header]) -> str | None:
    """Return the client's session key; None without one."""
    if not isinstance(headers, RequestHeaders):
        return session_id(headers)
    session = headers.findings.session
    if session is None:
        session = headers.findings.session = session_id(headers) or ""
    return session or None


def headers_for_replica(
    headers: Sequence[Header], *, request_id: str, api_key: str | None, passed: Container[bytes] = ()
) -> list[Header]:
    """Return `upstream_headers`; of repeated headers with their lines."""
    if not isinstance(headers, RequestHeaders):
        return upstream_headers(headers, request_id=request_id, api_key=api_key, passed=passed)
    cached = headers.findings.forwarded
    if cached is None or cached[0] is not passed or cached[1] != api_key:
        pairs = upstream_headers(headers, request_id=None, api_key=api_key, passed=passed)
        cached = headers.findings.forwarded = passed, api_key, EncodedHeaders(pairs, encode_lines(pairs))
    fixed = cached[2]
    encoded_id = request_id.encode("ascii")
    lines = b"%bx-request-id: %b\r\n" % (fixed.lines, encoded_id)
    return EncodedHeaders((*fixed, (b"x-request-id", encoded_id)), lines)
