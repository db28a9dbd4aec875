"""The interface of leadership: how a process becomes the leader, and how it finds that it is none any more.

Theory of operation: one process of those that tune the same proxies leads; it confirms that before each change. A
process that was paused may be replaced without a notice. What it still sends is refused: puts carry the versions that
it knows, and the history takes no rows of an earlier term.
"""

from __future__ import annotations

from typing import Protocol


class Leadership(Protocol):
    """The right of one process to change weights.

    `has_standby`: whether a second candidate waits; otherwise it ends with an error.
    """

    has_standby: bool

    async def try_to_lead(self) -> str | None:
        """Return None if this process leads now, otherwise why not. Tried once."""
        ...

    async def confirm_leadership(self) -> None:
        """Raise `LeadershipLost` if this process does not lead any more."""
        ...

    async def release(self) -> None:
        """Let another candidate lead; safe at any time."""
        ...
