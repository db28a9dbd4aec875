"""What a router hands to its successor: its listeners, over a connection that says when the successor serves.

Owns the name under which a running router is found (`offered`, `inherit`), and what passes on the connection. Leaves
what becomes of the predecessor to `parent`.

Theory of operation. A parent listens at an abstract Unix socket, named by the address of its admin listener: the name
is as unique as that address, and ends with its last owner. Both ends accept none but their own user and root. The
listeners pass as descriptors, and this socket with them, so the name outlives each parent. The connection then stays
open until the successor says that it serves, or ends.
"""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from gorgo.config.values import split_bind
from gorgo.errors import InvalidValueError

#: What a successor says once it serves, and what it hears if that took too long.
SERVES, LATE = b"serves", b"late"
#: A successor that does not serve by then is given up, s: hundreds of replicas and a model are read in a tenth of it.
#: No change is made until then.
LIMIT_S = 300.0
#: For the listeners of a parent, whose event loop serves nothing else, s.
_ANSWER_S = 5.0
_LISTENERS = b"listeners"
#: Users at the other end beside the own one: root can do all of this anyway.
_TRUSTED = (0,)
#: Process, user and group at the other end.
_PEER = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class Inherited:
    """What a parent is started with, of a predecessor or of systemd; `None` is its own to make."""

    data: socket.socket | None
    admin: socket.socket | None
    #: At which the next successor is waited for.
    offer: socket.socket | None = None
    #: The connection to the predecessor.
    predecessor: socket.socket | None = None


def offered(admin: socket.socket) -> socket.socket | None:
    """Return the socket at which a successor is waited for; `None` if another process has its name."""
    offer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        offer.bind(_name(admin.getsockname()))
    except OSError:
        offer.close()
        return None
    offer.listen(1)
    return offer


def peer_of(connection: socket.socket) -> int | None:
    """Return the process at the other end; `None` if it is another user's."""
    pid, user, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid if user in (*_TRUSTED, os.geteuid()) else None


def pass_listeners(connection: socket.socket, data: int, admin: int, offer: socket.socket | None) -> None:
    """Send the listeners to a successor. Raises `OSError`."""
    descriptors = [data, admin, *(() if offer is None else (offer.fileno(),))]
    socket.send_fds(connection, [_LISTENERS], descriptors)


def inherit(admin_bind: str) -> Inherited:
    """Return what the router has that runs with this address for `admin`. Raises `ConfigError`."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(_ANSWER_S)
    try:
        connection.connect(_name(_resolved(admin_bind)))
    except OSError as error:
        connection.close()
        raise InvalidValueError(
            "--takeover",
            f"no router can be taken over at the admin address {admin_bind}",
            "one that runs on this machine with --processes, or --admin-bind with its address",
        ) from error
    if peer_of(connection) is None:
        connection.close()
        raise InvalidValueError("--takeover", f"the router at {admin_bind} is another user's", "one of this user")
    return received(connection)


def received(connection: socket.socket) -> Inherited:
    """Return what a predecessor sends. Raises `ConfigError`."""
    connection.settimeout(_ANSWER_S)
    word, descriptors = b"", list[int]()
    with suppress(OSError):
        word, descriptors, _, _ = socket.recv_fds(connection, len(_LISTENERS), 3)
    sockets = [socket.socket(fileno=each) for each in descriptors]
    if word != _LISTENERS or len(sockets) < 2:
        connection.close()
        raise InvalidValueError(
            "--takeover",
            "the running router hands nothing over: it starts, stops, or another successor starts",
            "one that serves",
        )
    data, admin, *offers = sockets
    return Inherited(data, admin, next(iter(offers), None), connection)


def announce(predecessor: socket.socket) -> bool:
    """Say to the predecessor that this router serves; return whether it may: not if the predecessor has given it up.

    One that has ended in the meantime serves nothing any longer.
    """
    predecessor.setblocking(False)
    with predecessor:
        with suppress(OSError):
            if predecessor.recv(len(LATE)) == LATE:
                return False
        with suppress(OSError):
            predecessor.send(SERVES)
    return True


def _resolved(bind: str) -> tuple[Any, ...]:
    """Return the address that a listener at `bind` has."""
    host, port = split_bind(bind)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)[0][4]


def _name(address: tuple[Any, ...]) -> bytes:
    host, port = address[:2]
    return f"\0gorgo/{host}/{port}".encode()
