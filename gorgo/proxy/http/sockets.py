"""The sockets that the proxy listens on, and what their addresses are called.

Owns binding them. Who answers there is `server`'s.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gorgo.config.addresses import split_bind
from gorgo.errors import ConfigError

#: Connections that may wait to be accepted; a burst of clients that connect at once is larger than the usual 100.
BACKLOG = 1024


@dataclass(frozen=True, slots=True)
class ServerAddresses:
    """Where the proxy listens, with the ports that port 0 became."""

    data: tuple[str, int]
    admin: tuple[str, int]
    #: Clients speak TLS to the data listener.
    tls: bool = False

    @property
    def data_url(self) -> str:
        return _url(self.data, "https" if self.tls else "http")

    @property
    def admin_url(self) -> str:
        return _url(self.admin)


@contextmanager
def listening(bind: str, key: str) -> Iterator[socket.socket]:
    """A socket that already queues connections, so that `ready` is true when it is said. Raises `ConfigError`."""
    host, port = split_bind(bind)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Inherited by accepted connections: without it a first token waits for the ack of the headers.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            listener.bind((host, port))
            listener.listen(BACKLOG)
        except OSError as error:
            expected = "expected an address of this machine and a port that nobody else listens on"
            raise ConfigError(f"proxy.{key}: cannot listen on {bind}: {error.strerror}; {expected}") from error
        yield listener


def address_of(listener: socket.socket) -> tuple[str, int]:
    """Host and port, with the one that port 0 became."""
    host, port = listener.getsockname()[:2]
    return str(host), int(port)


def _url(address: tuple[str, int], scheme: str = "http") -> str:
    host, port = address
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
