"""The bytes of a request's head."""

from __future__ import annotations

from collections.abc import Sequence

from gorgo.live.http.headers import CONTROLS, Header


def encode_head(start: bytes, headers: Sequence[Header]) -> bytes:
    """Return a request's head. `start` is whole lines: the first of the head, and headers that never change.

    Raises `ValueError` for a control character, which could make two requests of one.
    """
    parts = [start]
    for name, value in headers:
        parts += (name, b": ", value, b"\r\n")
    parts.append(b"\r\n")
    head = b"".join(parts)
    # The listener refuses these too. A second check, since a head that reads as two requests is an attack.
    lines = start.count(b"\n") + len(headers) + 1
    if head.count(b"\n") != lines or head.count(b"\r") != lines or len(head.translate(None, CONTROLS)) != len(head):
        raise ValueError("a control character in a header")
    return head
