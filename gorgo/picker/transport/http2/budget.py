"""How many frames a client may send that carry no part of a message: a flood of them is cheap to send alone.

Owns the count. Rapid resets, pings, settings, windows, priorities, unknown frames and empty ones all draw on it.
"""

from __future__ import annotations

from gorgo.picker.transport.http2.frames import Code, Http2Error

#: Such frames without any message, until the next renewal: an Envoy of thousands of streams that all end at once.
FREE_FRAMES = 10_000
#: Allowed by each message received, and each DATA frame sent: a reset, and windows of stream and connection.
FRAMES_PER_MESSAGE = 4


class FrameBudget:
    """The budget of one connection."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = FREE_FRAMES

    def renew(self) -> None:
        """Allow all of `FREE_FRAMES` again: called with each look at a connection's signs of life."""
        self._left = FREE_FRAMES

    def earn(self) -> None:
        """Allow some more: a message has come or gone."""
        if self._left < FREE_FRAMES:
            self._left += FRAMES_PER_MESSAGE

    def spend(self) -> None:
        """Count a frame. Raises `Http2Error` for one too many."""
        self._left -= 1
        if self._left < 0:
            raise Http2Error(Code.ENHANCE_YOUR_CALM, f"expected messages: {FREE_FRAMES} frames had no part of one")
