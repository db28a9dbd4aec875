"""Limits of a listener: of connections, of one head in bytes and time, and of all incomplete heads in sum.

The sum has the bytes behind requests in progress too: they are the next head, or nothing.

Nearly every head comes in one piece and is never counted for longer than a step of the event loop. Eight thousand
connections with 64 KiB of a head each would be half a gigabyte, without a key and before any decision.
"""

from __future__ import annotations

from dataclasses import dataclass

#: About a thousand heads of the largest size, or each of the default's connections with 8 KiB.
MAX_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class HeadLimits:
    """Bounds of a request's head: its bytes, and the time to its last byte, s.

    The time counts from the head's first byte; that of the first head from the connection's start.
    """

    size_bytes: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class AcceptLimits:
    """Limits of new connections.

    `connections` may be open at once. One more ends the connection that has been idle for longest. If none is idle, it
    is closed without a response, which would need the resources in short supply.
    """

    head: HeadLimits
    connections: int


class PartialHeads:
    """The bytes of incomplete heads, and behind requests in progress.

    Example
    -------
    >>> heads = PartialHeads()
    >>> heads.replace(0, MAX_BYTES), heads.replace(0, 1), heads.replace(MAX_BYTES, 0), heads.used_bytes
    (True, False, True, 1)
    """

    __slots__ = ("used_bytes",)

    def __init__(self) -> None:
        self.used_bytes = 0

    def replace(self, before: int, now: int) -> bool:
        """Count a connection's `now` bytes instead of those `before`; return whether the sum is within the bound."""
        self.used_bytes += now - before
        return self.used_bytes <= MAX_BYTES
