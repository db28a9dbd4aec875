"""Header hygiene in both directions: what belongs to one hop stays there, and nobody but the Router picks a replica.

Owns the lists and the two filters. Names come in lower case (ASGI's rule) on the way up and in any case on the way
down; duplicates and order are kept.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence

Header = tuple[bytes, bytes]

#: RFC 9110, 7.6.1, and the older names that are still seen.
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

#: A client that could set these would choose the replica, the rank or the request id inside the engine itself.
TARGETS = (
    b"x-gateway-destination-endpoint",
    b"x-smg-target-worker",
    b"x-dynamo-worker-instance-id",
    b"x-dynamo-dp-rank",
    b"x-data-parallel-rank",
    b"x-override-",
    b"x-gorgo-",
)

#: Made anew for the next hop: the client of that hop writes them.
_REWRITTEN = frozenset({b"host", b"content-length", b"expect", b"x-request-id"})
#: Where clients put keys; all of them go when the replica has its own.
KEYS = frozenset({b"authorization", b"x-api-key", b"api-key"})

#: What a replica's server says about its own address, which is not where the client is: the client would go another way
#: than through the proxy, or forget what others keep under the proxy's name.
_OF_THE_REPLICA = frozenset(
    {b"alt-svc", b"clear-site-data", b"strict-transport-security", b"location", b"content-location", b"refresh"}
)

#: A name in lower case that the server can write: it would take anything else for a fault of the proxy. A replica's
#: odd header is left out.
NAME = re.compile(rb"[-!#$%&'*+.^_`|~0-9a-z]+")
#: What no line of a head may hold, CR and LF aside, which end it: some readers end one there, and nobody may write it
#: on to a replica.
CONTROLS = bytes(byte for byte in (*range(32), 127) if byte not in b"\t\r\n")
#: A body's length: at most 64 bits.
LENGTH = re.compile(rb"[0-9]{1,19}")
_ENCODING = b"content-encoding"
_VALUE = re.compile(rb"(?:[^\x00\s]+(?:[ \t]+[^\x00\s]+)*)?")

#: Headers in which clients name their session, most specific first (see the conventions of other routers).
SESSION_HEADERS = (b"x-session-id", b"x-dynamo-session-id", b"x-smg-routing-key", b"x-session-token")

#: What an id may look like so that it can go into logs, headers and URLs as it is.
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:@+=-]{1,128}")
#: Ids need to be unique, not secret: seeded by the system once, instead of asked for each time.
_IDS = random.Random()
#: Longer session keys are cut: they are only compared.
_SESSION_BYTES = 256


def request_id(headers: Iterable[Header]) -> str:
    """The client's own id if it is safe to repeat, else a new one."""
    for name, value in headers:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return value.decode("ascii")
    return new_id()


def new_id() -> str:
    """One that nobody else has, of no meaning."""
    return f"{_IDS.getrandbits(128):032x}"


def session_id(headers: Iterable[Header]) -> str | None:
    """The client's own session key, where it sends one."""
    best = len(SESSION_HEADERS)
    found: bytes | None = None
    for name, value in headers:
        if name in _SESSIONS and _SESSIONS[name] < best and value:
            best, found = _SESSIONS[name], value
    return None if found is None else found[:_SESSION_BYTES].decode("latin-1")


def upstream_headers(headers: Sequence[Header], *, request_id: str, api_key: str | None) -> list[Header]:
    """What the replica gets. Its own key replaces the client's; without one the client's passes."""
    dropped = _named_in_connection(headers)
    kept = [
        (name, value)
        for name, value in headers
        if name not in HOP_BY_HOP
        and name not in _REWRITTEN
        and name not in dropped
        and not (name[:2] == b"x-" and name.startswith(TARGETS))
        # Some servers read an underscore as a hyphen, and the name would be one of those above.
        and b"_" not in name
    ]
    kept.append((b"x-request-id", request_id.encode("ascii")))
    if api_key is not None:
        kept = [pair for pair in kept if pair[0] not in KEYS]
        kept.append((b"authorization", b"Bearer " + api_key.encode("latin-1")))
    return kept


def downstream_headers(headers: Sequence[Header], *, with_length: bool = True) -> list[Header]:
    """What the client gets of the replica's headers, names in lower case."""
    lowered = [(name.lower(), value.strip(b" \t")) for name, value in headers]
    dropped = _named_in_connection(lowered)
    return [
        (name, value)
        for name, value in lowered
        if name not in HOP_BY_HOP
        and name not in dropped
        and name not in _OF_THE_REPLICA
        and name != b"x-request-id"
        and not name.startswith(b"x-gorgo-")
        and (with_length or name != b"content-length")
        and NAME.fullmatch(name)
        and _VALUE.fullmatch(value)
    ]


def find(headers: Iterable[Header], wanted: bytes) -> bytes | None:
    """The first value of a header, by its lower-case name."""
    for name, value in headers:
        if name == wanted or name.lower() == wanted:
            return value
    return None


def is_event_stream(headers: Sequence[Header]) -> bool:
    kind = find(headers, b"content-type")
    return kind is not None and kind.lstrip().lower().startswith(b"text/event-stream")


def is_encoded(headers: Sequence[Header]) -> bool:
    """Whether any of its codings does something, however many lines they are on."""
    return any(
        (name == _ENCODING or name.lower() == _ENCODING) and value.strip().lower() not in (b"", b"identity")
        for name, value in headers
    )


def _named_in_connection(headers: Iterable[Header]) -> frozenset[bytes]:
    """Headers that this hop's `Connection` declares its own; empty for nearly every request."""
    named: frozenset[bytes] = frozenset()
    for name, value in headers:
        if name == b"connection":
            named |= {token.strip().lower() for token in value.split(b",")}
    return named


_SESSIONS = {name: rank for rank, name in enumerate(SESSION_HEADERS)}
