"""The sockets that a process listens on, and their addresses."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gorgo.config.values import split_bind
from gorgo.errors import InvalidValueError

#: Connections that may wait to be accepted; a burst of clients is larger than the usual 100.
BACKLOG = 1024


@dataclass(frozen=True, slots=True)
class ServerAddresses:
    """Addresses of the listeners, with the actual port for port 0."""

    data: tuple[str, int]
    admin: tuple[str, int]
    #: The data listener uses TLS.
    tls: bool = False

    @property
    def data_url(self) -> str:
        return _url(self.data, "https" if self.tls else "http")

    @property
    def admin_url(self) -> str:
        return _url(self.admin)


@contextmanager
def listening(bind: str, key: str) -> Iterator[socket.socket]:
    """Yield a socket that queues connections from now on. Raises `ConfigError`."""
    host, port = split_bind(bind)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Inherited by accepted connections: without it a first token waits for the ACK of the headers.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            listener.bind((host, port))
            listener.listen(BACKLOG)
        except OSError as error:
            raise _cannot_listen(bind, key, error) from error
        yield listener


def check_bind(bind: str, key: str) -> bool:
    """Return whether the port is free. Raises `InvalidValueError` for an address that no process here can listen on."""
    host, port = split_bind(bind)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise _cannot_listen(bind, key, error) from error
    return True


def _cannot_listen(bind: str, key: str, error: OSError) -> InvalidValueError:
    found = f"cannot listen on {bind}: {error.strerror}"
    return InvalidValueError(key, found, "an address of this machine and a free port")


def address_of(listener: socket.socket) -> tuple[str, int]:
    """Return host and actual port."""
    host, port = listener.getsockname()[:2]
    return str(host), int(port)


def _url(address: tuple[str, int], scheme: str = "http") -> str:
    host, port = address
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
