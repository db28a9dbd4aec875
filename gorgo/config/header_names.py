"""Names of headers that an operator may let through the proxy beside those that always pass."""

from __future__ import annotations

import re

#: Headers of one hop: RFC 9110, 7.6.1, and older names still in use.
HOP_BY_HOP = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-authentication-info"),
        *("proxy-connection", "te", "trailer", "transfer-encoding", "upgrade", "http2-settings"),
    }
)
#: Written anew by the proxy for each hop.
_OWN = frozenset({"host", "content-length", "expect", "x-request-id"})
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,127}")


def checked_header(name: str) -> str:
    """Return `name` if it is a header in lower case that may pass. Raises `ValueError` for one of a hop or ours."""
    if not _NAME.fullmatch(name):
        raise ValueError("the name of a header: lower case, digits and hyphens")
    if name in HOP_BY_HOP or name in _OWN or name.startswith("x-gorgo-"):
        raise ValueError("a header that is neither of one hop nor written by the proxy")
    return name
