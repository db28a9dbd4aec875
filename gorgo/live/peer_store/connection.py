"""Connections to the store, the names there, and what of the environment they and the group need.

Owns the client's bounds: each command has an end, and no command is repeated here. The service decides when to retry.
"""

from __future__ import annotations

import hmac
import re
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from gorgo.config.model import SharedConfig
from gorgo.core.peers.records import MAX_NAME_BYTES
from gorgo.errors import InvalidValueError, MissingExtra
from gorgo.live.extras import SHARED

if TYPE_CHECKING:
    from redis.asyncio import Redis
    from redis.asyncio.client import Pipeline


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
        problem = f"ca_file {shared.ca_file!r}: {reason}"
        raise InvalidValueError("shared", problem, "certificates of authorities in PEM form") from failure


def store_password(shared: SharedConfig, environ: Mapping[str, str]) -> str | None:
    """Return the password. Raises `InvalidValueError` if its variable is not set."""
    if shared.password_env is None:
        return None
    password = environ.get(shared.password_env, "").strip()
    if not password:
        problem = f"the environment variable {shared.password_env} is not set"
        raise InvalidValueError("shared", problem, "it to hold the store's password")
    return password


def group_key(shared: SharedConfig, environ: Mapping[str, str]) -> int:
    """Return the group's fingerprint key. Raises `InvalidValueError` if its variable holds none."""
    text = environ.get(shared.key_env, "").strip()
    if _KEY.fullmatch(text) is None:
        lacking = f"holds no key ({len(text)} characters)" if text else "is not set"
        raise InvalidValueError("shared", f"the environment variable {shared.key_env} {lacking}", KEY_EXPECTED)
    return int(text, 16)


def seal_key(shared: SharedConfig, environ: Mapping[str, str]) -> bytes:
    """Return the key of the tags of entries, derived from the group's. Raises `InvalidValueError`."""
    return blake2b(f"{group_key(shared, environ):x}".encode(), person=b"gorgo entries").digest()


def router_name(shared: SharedConfig) -> str:
    """Return the router's name in its group."""
    return shared.router or _NOT_IN_NAMES.sub("-", socket.gethostname()).strip("-._")[:63] or "router"


# Names in the store: one stream of reports per run of a router, and the group's members with their last time.
#
# A member is `ROUTER/RUN`: a router that starts anew is another member, so that its reports are numbered from one
# again.


#: Digits of the run that are enough to tell runs of one router apart.
_RUN_DIGITS = 8
#: The field of an entry.
FIELD = b"report"
#: After so long without a report a router is no member, and its stream is gone, s: a router that takes its place has
#: its history until then.
RETAIN_S = 600.0
#: Between two looks at the members, s.
MEMBERS_S = 1.0


#: Bytes of a tag: nobody forges one of these by trying.
TAG_BYTES = 16


@dataclass(frozen=True, slots=True)
class StoreNames:
    """Keys of one group, and the tags by which its routers know what one of them has written.

    `key` is the group's. Whoever may write to the store and has not this key writes nothing that is parsed.

    >>> names = StoreNames("qwen", b"the key of the group")
    >>> names.stream("eu-1/0123abcd")
    'gorgo:qwen:reports:eu-1/0123abcd'
    >>> names.opened("eu-1/0123abcd", names.sealed("eu-1/0123abcd", b"[]"))
    b'[]'
    """

    group: str
    key: bytes

    @property
    def members(self) -> str:
        """Return the sorted set of members, by the time of the store at which each last said that it is there."""
        return f"gorgo:{self.group}:members"

    def stream(self, member: str) -> str:
        """Return the stream of a member, which it alone writes."""
        return f"gorgo:{self.group}:reports:{member}"

    def sealed(self, member: str, report: bytes) -> bytes:
        """Return an entry of the stream of `member`: a tag, then the report."""
        return self._tag(b"report", member, report) + report

    def opened(self, member: str, entry: bytes) -> bytes | None:
        """Return the report of an entry; `None` without the tag of this group and member."""
        report = entry[TAG_BYTES:]
        return report if hmac.compare_digest(entry[:TAG_BYTES], self._tag(b"report", member, report)) else None

    def listed(self, member: str) -> str:
        """Return a member as the list of members has it: with its tag."""
        return f"{member}#{self._tag(b'member', member, b'').hex()}"

    def read_listed(self, name: bytes) -> str | None:
        """Return a member of the list; `None` for what no router of this group has written."""
        member = read_member(name.rpartition(b"#")[0])
        return member if member is not None and hmac.compare_digest(name, self.listed(member).encode()) else None

    def _tag(self, purpose: bytes, member: str, text: bytes) -> bytes:
        prefix = f"{self.group}\0{member}\0".encode()
        return blake2b(prefix + text, key=self.key, digest_size=TAG_BYTES, person=purpose).digest()


def member_name(router: str, boot_id: str) -> str:
    """Return the member of a run of a router."""
    return f"{router}/{boot_id[:_RUN_DIGITS]}"


def read_member(name: bytes) -> str | None:
    """Return a member as the store names it; `None` for what no router has written."""
    text = name.decode("utf-8", "replace")
    return text if text.isprintable() and 0 < len(name) <= MAX_NAME_BYTES else None


# Several commands in one round trip.


async def execute(pipeline: Pipeline) -> list[Any]:
    """Return the answers. Raises the first error as the store has it; the client's own would quote the command."""
    answers: list[Any] = await pipeline.execute(raise_on_error=False)
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers
