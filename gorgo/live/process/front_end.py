"""What serves requests in a process, as the process runs it."""

from __future__ import annotations

import asyncio
from typing import Protocol


class FrontEnd(Protocol):
    """The listener for requests, above what routes."""

    @property
    def address(self) -> tuple[str, int]:
        """Return host and port of the listener, once it has started."""
        ...

    async def start(self) -> None:
        """Do what must succeed before the process is one. Raises `ConfigError`, also if it cannot listen."""
        ...

    async def serve_requests(self, closing: asyncio.Event) -> None:
        """Serve until `closing` is set, then close the listener."""
        ...

    async def end_exchanges(self, stop_now: asyncio.Event) -> None:
        """Let open exchanges end within the grace period, or until `stop_now` is set; then end them.

        Called once, before `closing` is set, with `LiveState.stopping` already true.
        """
        ...
