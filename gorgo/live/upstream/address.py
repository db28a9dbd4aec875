"""Opening a socket to a replica: name resolution, the race of its addresses, and why there is no connection.

Owns the addresses of one host, and the words for operators: refused, no such name, TLS, no route, timeout. They have no
text of the peer. The stable `reason` of a failure is the client's.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import suppress

from aiohappyeyeballs import start_connection

from gorgo.config.values import is_ip_address

#: Between two look-ups of a name in the background, s. Kubernetes' DNS holds an answer for 5 s by default.
RESOLVE_INTERVAL_S = 5.0
#: Look-ups in a row without an address after which it has left: servers that name a few of many addresses, or another
#: one each time, leave one out now and then.
MISSING_ANSWERS = 2
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


class AddressRefusedError(OSError):
    """A name stands for no address at which its replica may be. The message says why."""


class Address:
    """Where a replica listens.

    A name is looked up at the first connection and after a failed one; `resolve_name` does it in between, so that no
    request waits for DNS. The address in use is tried first while the name has it: one replica is one process.
    """

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port
        #: Says why an address that the name stands for is not connected to, `None` for one that may be.
        self.refuses: Callable[[str], str | None] | None = None
        self.is_name = not is_ip_address(host)
        #: The address of the last connection.
        self.peer: str | None = None
        #: By address and port, with the look-ups in a row that were without it.
        self._found: dict[tuple[str, int], tuple[_Address, int]] = {}
        self._resolving: asyncio.Task[None] | None = None
        #: The last connection failed: the name may have moved.
        self._failed = False

    @property
    def addresses(self) -> frozenset[str]:
        """What the name has: found by one of the last `MISSING_ANSWERS` look-ups; empty before the first."""
        return frozenset(text for text, _ in self._found)

    async def resolve_name(self) -> None:
        """Look the name up. Raises `OSError`; what was found before then stays."""
        if self._resolving is None:
            self._resolving = asyncio.ensure_future(self._resolve())
            self._resolving.add_done_callback(self._on_resolved)
        await asyncio.shield(self._resolving)

    async def open_socket(self) -> socket.socket:
        """Return a connected socket to the first address that accepts. Raises `OSError`."""
        if not self._found:
            await self.resolve_name()
        elif self._failed:
            with suppress(OSError):  # without DNS the known addresses are as good as before
                await self.resolve_name()
        # Those of the last answer first, in its order, but the one in use before all.
        entries = sorted(self._found.items(), key=lambda entry: (entry[0][0] != self.peer, entry[1][1]))
        entries = [entry for entry in entries if self._refused(entry[0][0]) is None]
        if not entries:
            raise AddressRefusedError(f"its name {self.host} stands for addresses that are refused since then")
        try:
            connected = await start_connection(
                [address for _, (address, _) in entries], happy_eyeballs_delay=ATTEMPT_DELAY_S
            )
        except BaseException:
            self._failed = True
            raise
        self._failed = False
        return connected

    def is_replaced(self, peer: str) -> bool:
        """Use `peer`, the address of a new connection; return whether another process is there than before.

        Two addresses of a name that are of different families are one machine's.
        """
        before, self.peer = self.peer, peer
        if before is None or before == peer:
            return False
        return not ({before, peer} <= self.addresses and (":" in before) != (":" in peer))

    def _refused(self, text: str) -> str | None:
        return None if self.refuses is None or not self.is_name else self.refuses(text)

    async def _resolve(self) -> None:
        loop = asyncio.get_running_loop()
        answer: list[_Address] = [*await loop.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)]
        resolved: dict[tuple[str, int], tuple[_Address, int]] = {}
        reason: str | None = None
        for address in answer:
            if (refused := self._refused(str(address[4][0]))) is None:
                resolved.setdefault((str(address[4][0]), int(address[4][1])), (address, 0))
            else:
                reason = refused
        if reason is not None and not resolved:
            raise AddressRefusedError(f"its name {self.host} stands for another place: {reason}")
        for endpoint, (address_before, missing) in self._found.items():
            if endpoint not in resolved and missing + 1 < MISSING_ANSWERS:
                resolved[endpoint] = address_before, missing + 1
        if answer:
            self._found = resolved

    def _on_resolved(self, task: asyncio.Task[None]) -> None:
        self._resolving = None
        if not task.cancelled():
            task.exception()  # whoever waits gets it; nobody may


def connect_cause(failure: BaseException) -> str | None:
    """Return the cause of a failed connection, `None` if it is of no known kind.

    >>> connect_cause(ConnectionRefusedError(111, "Connection refused"))
    'connection refused'
    >>> connect_cause(socket.gaierror(socket.EAI_NONAME, "Name or service not known"))
    'its name is not in DNS'
    """
    return next((words for one in _chain(failure) if (words := _words(one)) is not None), None)


def _words(failure: BaseException) -> str | None:
    if isinstance(failure, AddressRefusedError):
        return str(failure)
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
    failures: list[BaseException] = []
    pending: list[object] = [failure]
    while pending and len(failures) < _MAX_DEPTH:
        one = pending.pop()
        if isinstance(one, BaseException) and one not in failures:
            failures.append(one)
            # Several addresses may fail as a group.
            pending += [*getattr(one, "exceptions", ()), one.__context__, one.__cause__]
    yield from reversed(failures)
