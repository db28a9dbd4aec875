"""Connections to the store, and what of the environment they and the group need.

Owns the client's bounds: each command has an end, and no command is repeated here. The service decides when to retry.
"""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from gorgo.config.model import SharedConfig
from gorgo.errors import InvalidValueError, MissingExtra
from gorgo.live.extras import SHARED

if TYPE_CHECKING:
    from redis.asyncio import Redis

KEY_EXPECTED = "it to hold 32 to 128 hexadecimal digits; openssl rand -hex 32 makes a key"

#: A store is near: one that needs longer is as good as gone, and the router goes on alone.
CONNECT_S = 1.0
COMMAND_S = 1.0
#: One that writes, one that reads, and those of a command in between.
MAX_CONNECTIONS = 4
DEFAULT_PORT = 6379

_KEY = re.compile(r"[0-9A-Fa-f]{32,128}")
#: As names in regions.yaml.
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")


def store_client(shared: SharedConfig, environ: Mapping[str, str]) -> Redis:
    """Return a client of the store; it connects with its first command.

    Raises `MissingExtra`, or `InvalidValueError` for a variable or file that cannot be used.
    """
    try:
        from redis.asyncio import Connection, ConnectionPool, Redis, SSLConnection
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
    except ImportError as error:
        raise MissingExtra(SHARED.missing) from error

    class OwnAuthorities(SSLConnection):
        """A connection that trusts the context's authorities alone; the package would add those of the system."""

        def __init__(self, *, context: ssl.SSLContext, **arguments: Any) -> None:
            super().__init__(**arguments)
            self.ssl_context.context = context

    arguments, tls = connection_arguments(shared, environ) | {"retry": Retry(NoBackoff(), 0)}, store_tls(shared)
    kind: type[Connection] = Connection
    if tls is not None:
        arguments["context"], kind = tls, OwnAuthorities
    return Redis.from_pool(ConnectionPool(connection_class=kind, max_connections=MAX_CONNECTIONS, **arguments))


def connection_arguments(shared: SharedConfig, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of a connection, those of TLS left out. Raises `InvalidValueError`."""
    parts = urlsplit(shared.url)
    return {
        "host": parts.hostname,
        "port": parts.port or DEFAULT_PORT,
        "db": int(parts.path.strip("/") or 0),
        "username": shared.username,
        "password": store_password(shared, environ),
        "socket_connect_timeout": CONNECT_S,
        "socket_timeout": COMMAND_S,
        "socket_keepalive": True,
        "protocol": 2,
        "client_name": "gorgo",
    }


def store_tls(shared: SharedConfig) -> ssl.SSLContext | None:
    """Return the context with the authorities that are trusted; `None` without TLS. Raises `InvalidValueError`."""
    if not shared.url.startswith("rediss:"):
        return None
    if shared.ca_file is None:
        return ssl.create_default_context()
    try:
        if Path(shared.ca_file).is_fifo():
            raise ValueError("it is a pipe")
        return ssl.create_default_context(cafile=shared.ca_file)
    except (OSError, ValueError) as failure:  # `ssl.SSLError` is an `OSError`
        reason = getattr(failure, "strerror", None) or str(failure)
        found = f"ca_file {shared.ca_file!r}: {reason}"
        raise InvalidValueError("shared", found, "certificates of authorities in PEM form") from failure


def store_password(shared: SharedConfig, environ: Mapping[str, str]) -> str | None:
    """Return the password. Raises `InvalidValueError` if its variable is not set."""
    if shared.password_env is None:
        return None
    password = environ.get(shared.password_env, "").strip()
    if not password:
        found = f"the environment variable {shared.password_env} is not set"
        raise InvalidValueError("shared", found, "it to hold the store's password")
    return password


def group_key(shared: SharedConfig, environ: Mapping[str, str]) -> int:
    """Return the group's fingerprint key. Raises `InvalidValueError` if its variable holds none."""
    text = environ.get(shared.key_env, "").strip()
    if _KEY.fullmatch(text) is None:
        lacking = f"holds no key ({len(text)} characters)" if text else "is not set"
        raise InvalidValueError("shared", f"the environment variable {shared.key_env} {lacking}", KEY_EXPECTED)
    return int(text, 16)


def router_name(shared: SharedConfig) -> str:
    """Return the router's name in its group."""
    return shared.router or _NOT_IN_NAMES.sub("-", socket.gethostname()).strip("-._")[:63] or "router"
