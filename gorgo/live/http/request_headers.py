"""Headers of a request, with what was found in them: found once for all requests of a connection that repeat them.

Theory of operation. Most clients send the same lines on a connection again and again, and only the length of the body
differs. The listener recognises such a head, and its headers get the findings of the one before. A finding is therefore
never about the length. Each finding names what else it depends on, so that a reload makes it anew.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any

from gorgo.live.http.headers import Header, encode_lines, new_id, own_request_id, session_id, upstream_headers


class HeaderFindings:
    """What was found in headers. `None`: not known yet."""

    __slots__ = ("admitted", "forwarded", "is_json", "options", "request_id", "session", "withheld")

    def __init__(self) -> None:
        #: The keys of clients, the name of this client, the place of its key, and findings without the key.
        self.admitted: tuple[object, str, int, HeaderFindings] | None = None
        #: The names that an operator passes, the replica's key, and the headers for a replica.
        self.forwarded: tuple[object, str | None, UpstreamHeaders] | None = None
        #: The body may be read as JSON.
        self.is_json = False
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


class UpstreamHeaders(list[Header]):
    """Headers for a replica; `lines` are the same as bytes, checked for control characters."""

    __slots__ = ("lines",)

    def __init__(self, headers: Iterable[Header], lines: bytes) -> None:
        super().__init__(headers)
        self.lines = lines


def request_id_of(headers: Sequence[Header]) -> str:
    """Return the client's own id if it is safe to repeat, else a new one."""
    if not isinstance(headers, RequestHeaders):
        return own_request_id(headers) or new_id()
    found = headers.findings.request_id
    if found is None:
        found = headers.findings.request_id = own_request_id(headers) or ""
    return found or new_id()


def session_of(headers: Sequence[Header]) -> str | None:
    """Return the client's session key; None without one."""
    if not isinstance(headers, RequestHeaders):
        return session_id(headers)
    found = headers.findings.session
    if found is None:
        found = headers.findings.session = session_id(headers) or ""
    return found or None


def headers_for_replica(
    headers: Sequence[Header], *, request_id: str, api_key: str | None, passed: Container[bytes] = ()
) -> list[Header]:
    """Return `upstream_headers`; of repeated headers with their lines."""
    if not isinstance(headers, RequestHeaders):
        return upstream_headers(headers, request_id=request_id, api_key=api_key, passed=passed)
    known = headers.findings.forwarded
    if known is None or known[0] is not passed or known[1] != api_key:
        pairs = upstream_headers(headers, request_id=None, api_key=api_key, passed=passed)
        known = headers.findings.forwarded = passed, api_key, UpstreamHeaders(pairs, encode_lines(pairs))
    fixed = known[2]
    own = request_id.encode("ascii")
    found = UpstreamHeaders(fixed, b"%bx-request-id: %b\r\n" % (fixed.lines, own))
    found.append((b"x-request-id", own))
    return found
