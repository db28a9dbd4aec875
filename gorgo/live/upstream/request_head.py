"""The bytes of a request's head."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gorgo.live.http.headers import Header, encode_lines
from gorgo.live.http.request_headers import UpstreamHeaders

_METHOD = re.compile(rb"[A-Za-z]+")
_TARGET = re.compile(rb"[\x21-\x7e]+")


def request_line(method: bytes, target: bytes) -> bytes:
    """Return the first line of a head. Raises `ValueError` for what does not stay within it."""
    if _METHOD.fullmatch(method) is None or _TARGET.fullmatch(target) is None:
        raise ValueError("a method or a target that is not one word")
    return b"%b %b HTTP/1.1\r\n" % (method, target)


def encode_head(start: bytes, headers: Sequence[Header], *, length: int | None = None) -> bytes:
    """Return a request's head, with the `length` of its body if there is one.

    `start` is the request line, and lines of headers that never change. Raises `ValueError` for a control character.
    """
    lines = headers.lines if isinstance(headers, UpstreamHeaders) else encode_lines(headers)
    if length is None:
        return b"%b%b\r\n" % (start, lines)
    return b"%b%bContent-Length: %d\r\n\r\n" % (start, lines, length)
