"""Opening a socket to a replica: name resolution, the race of its addresses, and why there is no connection.

Owns the addresses of one host, and the words for operators: refused, no such name, TLS, no route, timeout. They have no
text of the peer. The stable `reason` of a failure is the client's.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Iterator
from time import monotonic

from aiohappyeyeballs import start_connection

#: Addresses are used for so long before their name is resolved again, s: a burst of connections resolves it once.
RESOLVED_S = 10.0
#: Head start of an address before the next one is tried beside it, s (RFC 8305).
ATTEMPT_DELAY_S = 0.25

#: Exceptions in a chain that are examined; libraries wrap a failure two or three times.
_MAX_DEPTH = 8
_NO_NAME = frozenset({socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)})
_BY_ERRNO = {
    errno.ECONNREFUSED: "connection refused",
    errno.ECONNRESET: "connection reset",
    errno.EHOSTUNREACH: "no route to the host",
    errno.ENETUNREACH: "no route to the host",
    errno.EADDRNOTAVAIL: "no local address is free",
    errno.ETIMEDOUT: "timeout",
}

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


def connect_cause(failure: BaseException) -> str | None:
    """Return the cause of a failed connection, `None` if it is of no known kind.

    >>> connect_cause(ConnectionRefusedError(111, "Connection refused"))
    'connection refused'
    >>> connect_cause(socket.gaierror(socket.EAI_NONAME, "Name or service not known"))
    'its name is not in DNS'
    """
    return next((words for one in _chain(failure) if (words := _words(one)) is not None), None)


def _words(failure: BaseException) -> str | None:
    if isinstance(failure, socket.gaierror):
        return "its name is not in DNS" if failure.errno in _NO_NAME else "DNS does not answer"
    if isinstance(failure, ssl.SSLCertVerificationError):
        return f"TLS certificate: {getattr(failure, 'verify_message', None) or 'not valid'}"
    if isinstance(failure, ssl.SSLError):
        return f"TLS: {(getattr(failure, 'reason', None) or 'handshake failed').replace('_', ' ').lower()}"
    if isinstance(failure, TimeoutError):
        return "timeout"
    return _BY_ERRNO.get(failure.errno or 0) if isinstance(failure, OSError) else None


def _chain(failure: BaseException) -> Iterator[BaseException]:
    """Yield the failure and those that it wraps, the innermost first: that is the most exact."""
    found: list[BaseException] = []
    pending: list[object] = [failure]
    while pending and len(found) < _MAX_DEPTH:
        one = pending.pop()
        if isinstance(one, BaseException) and one not in found:
            found.append(one)
            # Several addresses may fail as a group.
            pending += [*getattr(one, "exceptions", ()), one.__context__, one.__cause__]
    yield from reversed(found)
