"""What serves requests in a process, as the process runs it."""

from __future__ import annotations

import asyncio
from typing import Protocol

from gorgo.live.state import LiveState


class FrontEnd(Protocol):
    """The listener for requests, with all state of the process."""

    @property
    def state(self) -> LiveState: ...

    @property
    def address(self) -> tuple[str, int]:
        """Return host and port of the listener."""
        ...

    async def serve_requests(self, closing: asyncio.Event) -> None:
        """Serve until `closing` is set, then close the listener."""
        ...

    async def end_exchanges(self, stop_now: asyncio.Event) -> None:
        """Let open exchanges end within the grace period, or until `stop_now` is set; then end them.

        Called once, before `closing` is set, with `state.stopping` already true.
        """
        ...
