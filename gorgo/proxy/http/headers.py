"""Filters of headers in both directions: hop-by-hop headers end here, and only the Router chooses a replica.

Names of requests are in lower case (ASGI's rule), names of responses in any case. Duplicates and order are preserved.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence

Header = tuple[bytes, bytes]

#: RFC 9110, 7.6.1, and older names still in use.
HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-authentication-info",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"http2-settings",
    }
)

#: With these a client could choose the replica, the rank or the request id inside the engine.
TARGETS = (
    b"x-gateway-destination-endpoint",
    b"x-smg-target-worker",
    b"x-dynamo-worker-instance-id",
    b"x-dynamo-dp-rank",
    b"x-data-parallel-rank",
    b"x-override-",
    b"x-gorgo-",
)

#: Written anew for the next hop.
_REWRITTEN = frozenset({b"host", b"content-length", b"expect", b"x-request-id"})
#: Headers of clients' keys; removed when the replica has its own key.
KEYS = frozenset({b"authorization", b"x-api-key", b"api-key"})

#: Headers about the replica's own address: the client would bypass the proxy, or clear data of the proxy's host.
_REPLICA_ADDRESS = frozenset(
    {b"alt-svc", b"clear-site-data", b"strict-transport-security", b"location", b"content-location", b"refresh"}
)

#: A name in lower case that hypercorn can write. A replica's header with another name is left out.
NAME = re.compile(rb"[-!#$%&'*+.^_`|~0-9a-z]+")
#: Bytes that no line of a head may contain, CR and LF aside: some readers end a line there.
CONTROLS = bytes(byte for byte in (*range(32), 127) if byte not in b"\t\r\n")
#: A body's length: at most 64 bits.
LENGTH = re.compile(rb"[0-9]{1,19}")
_ENCODING = b"content-encoding"
_VALUE = re.compile(rb"(?:[^\x00\s]+(?:[ \t]+[^\x00\s]+)*)?")

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
    for name, value in headers:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return value.decode("ascii")
    return new_id()


def new_id() -> str:
    """Return a unique random id."""
    return f"{_IDS.getrandbits(128):032x}"


def session_id(headers: Iterable[Header]) -> str | None:
    """Return the client's session key; None without one."""
    best = len(SESSION_HEADERS)
    found: bytes | None = None
    for name, value in headers:
        if name in _SESSIONS and _SESSIONS[name] < best and value:
            best, found = _SESSIONS[name], value
    return None if found is None else found[:_SESSION_BYTES].decode("latin-1")


def upstream_headers(headers: Sequence[Header], *, request_id: str, api_key: str | None) -> list[Header]:
    """Return the headers for the replica. Its own key replaces the client's; without one the client's passes."""
    dropped = _named_in_connection(headers)
    passed = [
        (name, value)
        for name, value in headers
        if name not in HOP_BY_HOP
        and name not in _REWRITTEN
        and name not in dropped
        and not (name[:2] == b"x-" and name.startswith(TARGETS))
        # Some servers read an underscore as a hyphen, and the name would be one of those above.
        and b"_" not in name
    ]
    passed.append((b"x-request-id", request_id.encode("ascii")))
    if api_key is not None:
        passed = [pair for pair in passed if pair[0] not in KEYS]
        passed.append((b"authorization", b"Bearer " + api_key.encode("latin-1")))
    return passed


def downstream_headers(headers: Sequence[Header], *, with_length: bool = True) -> list[Header]:
    """Return the headers for the client, names in lower case."""
    lowered = [(name.lower(), value.strip(b" \t")) for name, value in headers]
    dropped = _named_in_connection(lowered)
    return [
        (name, value)
        for name, value in lowered
        if name not in HOP_BY_HOP
        and name not in dropped
        and name not in _REPLICA_ADDRESS
        and name != b"x-request-id"
        and not name.startswith(b"x-gorgo-")
        and (with_length or name != b"content-length")
        and NAME.fullmatch(name)
        and _VALUE.fullmatch(value)
    ]


def find(headers: Iterable[Header], header: bytes) -> bytes | None:
    """Return the first value of a header, by its lower-case name."""
    for name, value in headers:
        if name == header or name.lower() == header:
            return value
    return None


def is_event_stream(headers: Sequence[Header]) -> bool:
    kind = find(headers, b"content-type")
    return kind is not None and kind.lstrip().lower().startswith(b"text/event-stream")


def is_encoded(headers: Sequence[Header]) -> bool:
    """Return whether a coding other than `identity` applies."""
    return any(
        (name == _ENCODING or name.lower() == _ENCODING) and value.strip().lower() not in (b"", b"identity")
        for name, value in headers
    )


def _named_in_connection(headers: Iterable[Header]) -> frozenset[bytes]:
    """Return the headers that `Connection` makes hop-by-hop; empty for nearly every request."""
    named: frozenset[bytes] = frozenset()
    for name, value in headers:
        if name == b"connection":
            named |= {token.strip().lower() for token in value.split(b",")}
    return named


_SESSIONS = {name: rank for rank, name in enumerate(SESSION_HEADERS)}
