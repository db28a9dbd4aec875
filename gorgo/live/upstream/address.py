"""Opening a socket to a replica: name resolution, and the race of its addresses.

Owns the addresses of one host. Leaves the failures' words to `connect_cause`.
"""

from __future__ import annotations

import asyncio
import socket
from time import monotonic

from aiohappyeyeballs import start_connection

#: Addresses are used for so long before their name is resolved again, s: a burst of connections resolves it once.
RESOLVED_S = 10.0
#: Head start of an address before the next one is tried beside it, s (RFC 8305).
ATTEMPT_DELAY_S = 0.25

_Address = tuple[int, int, int, str, tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]]


class Address:
    """Where a replica listens."""

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self._resolved: list[_Address] = []
        self._resolved_s = float("-inf")

    async def open_socket(self) -> socket.socket:
        """Return a connected socket to the first address that accepts. Raises `OSError`."""
        now = monotonic()
        if now - self._resolved_s > RESOLVED_S:
            loop = asyncio.get_running_loop()
            self._resolved = [*await loop.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)]
            self._resolved_s = now
        try:
            return await start_connection(self._resolved, happy_eyeballs_delay=ATTEMPT_DELAY_S)
        except BaseException:
            self._resolved_s = float("-inf")  # it may have moved
            raise
