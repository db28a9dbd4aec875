"""The sockets that the proxy listens on, and their addresses."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gorgo.config.addresses import split_bind
from gorgo.errors import ConfigError

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
            expected = "expected an address of this machine and a free port"
            raise ConfigError(f"proxy.{key}: cannot listen on {bind}: {error.strerror}; {expected}") from error
        yield listener


def address_of(listener: socket.socket) -> tuple[str, int]:
    """Return host and actual port."""
    host, port = listener.getsockname()[:2]
    return str(host), int(port)


def _url(address: tuple[str, int], scheme: str = "http") -> str:
    host, port = address
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
