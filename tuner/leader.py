"""Leadership: how a process becomes the leader, and how it finds that it is none any more.

Owns the interface, and three ways to hold it: a lease in the store of several routers (`StoreLease`), a lock file on
one host (`FileLock`), and advisory locks of PostgreSQL (`AdvisoryLock`). Leaves to `tuner.sidecar.bootstrap` what a
candidate does with it.

Theory of operation: one process of those that tune the same proxies leads; it confirms that before each change. A
process that was paused may be replaced without a notice. What it still sends is refused: puts carry the versions that
it knows, and the history takes no rows of an earlier term.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import SQLAlchemyError

from gorgo.errors import HistoryError, LeadershipLost
from tuner.history.database import open_engine, shown

if TYPE_CHECKING:
    from redis.asyncio import Redis


class Leadership(Protocol):
    """The right of one process to change weights.

    `has_standby`: whether a second candidate waits; otherwise it ends with an error.
    """

    has_standby: bool

    async def try_to_lead(self) -> str | None:
        """Return None if this process leads now, otherwise why not. Tried once."""
        ...

    async def confirm_leadership(self) -> None:
        """Raise `LeadershipLost` if this process does not lead any more."""
        ...

    async def release(self) -> None:
        """Let another candidate lead; safe at any time."""
        ...


# Leadership by a lease in the store of several routers, renewed at a third of its time.
#
# A lease names its holder, and only the holder renews or deletes it, by scripts that compare. The time that is left is
# counted here from before the last renewal was sent, by a clock that nothing sets: a process that was paused, or
# cannot reach the store, stops before another one can hold the lease. Each new holder gets a higher number (the
# fencing token).


#: A leader that was killed is replaced after this time; a renewal may fail twice.
LEASE_S = 10.0
#: How long before the end of the lease its holder stops: more than clocks of two hosts drift in ten seconds.
MARGIN_S = 0.5

_TAKE = """
if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then return redis.call('INCR', KEYS[2]) end
return 0
"""
_RENEW = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('PEXPIRE', KEYS[1], ARGV[2]) end return 0"
_DELETE = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"


class StoreLease(Leadership):
    """The lease of one candidate.

    Parameters
    ----------
    client:
        Of the store, with time-outs.
    group:
        Of the routers; names the key.
    lease_s:
        How long a lease lasts without a renewal.
    renew_s:
        Time between renewals; a third of `lease_s` unless given.
    clock:
        Monotonic seconds.
    """

    has_standby = True

    def __init__(
        self,
        client: Redis,
        group: str,
        *,
        lease_s: float = LEASE_S,
        renew_s: float | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.token = 0
        self._client, self._lease_s, self._now = client, lease_s, clock
        self._renew_s = lease_s / 3 if renew_s is None else renew_s
        self._keys = (f"gorgo:{group}:tuner", f"gorgo:{group}:tuner:token")
        self._holder = secrets.token_hex(16)
        self._until_s = float("-inf")
        self._renewing: asyncio.Task[None] | None = None

    async def try_to_lead(self) -> str | None:
        """Return None with the lease, otherwise why not."""
        began_s = self._now()
        try:
            token = int(await self._script(_TAKE, *self._keys, self._holder, self._lease_ms))
        except Exception as error:  # noqa: BLE001 - the client has several families of errors
            return f"the store gives no lease: {type(error).__name__} {error}"
        if not token:
            return "another process leads"
        self.token, self._until_s = token, began_s + self._lease_s
        self._renewing = asyncio.create_task(self._renew())
        return None

    async def confirm_leadership(self) -> None:
        """Compare the time that is left with the clock."""
        if self._now() >= self._until_s - MARGIN_S:
            raise LeadershipLost("the lease in the store has ended")

    async def release(self) -> None:
        """Delete the lease if it is this process's, and end the renewals."""
        self._until_s = float("-inf")
        task, self._renewing = self._renewing, None
        if task is None:
            return
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        with suppress(Exception):  # the lease ends by itself
            await self._script(_DELETE, self._keys[0], self._holder)

    async def _renew(self) -> None:
        """Renew until the lease has ended; a failed renewal is tried again."""
        while self._now() < self._until_s:
            await asyncio.sleep(self._renew_s)
            began_s = self._now()
            try:
                renewed = await self._script(_RENEW, self._keys[0], self._holder, self._lease_ms)
            except Exception:  # noqa: BLE001 - as above
                continue
            self._until_s = began_s + self._lease_s if renewed else float("-inf")

    @property
    def _lease_ms(self) -> int:
        return int(self._lease_s * 1000)

    async def _script(self, script: str, *words: str | int) -> Any:
        keys = sum(str(word).startswith("gorgo:") for word in words)
        return await self._client.eval(script, keys, *words)


# Leadership on one host: a lock file per proxy beside the history in SQLite.
#
# The system releases the lock with its process, however that ends. The files stay: removing one would give two
# processes a lock each.


#: Hexadecimal digits of an address in the name of its file.
DIGITS = 12


class FileLock(Leadership):
    """Locks on the proxies of one tuner.

    Parameters
    ----------
    history:
        File of the history.
    urls:
        Of the proxies.
    """

    has_standby = False

    def __init__(self, history: Path, urls: Iterable[str]) -> None:
        self._paths = {
            url: history.with_name(f"{history.name}.{sha256(url.encode()).hexdigest()[:DIGITS]}.lock")
            for url in sorted(urls)
        }
        self._open: list[int] = []

    async def try_to_lead(self) -> str | None:
        """Return None with all locks, otherwise which proxy another process tunes."""
        for url, path in self._paths.items():
            reason = self._lock(url, path)
            if reason is not None:
                await self.release()
                return reason
        return None

    async def confirm_leadership(self) -> None:
        """Do nothing: the lock lasts as long as the process."""

    async def release(self) -> None:
        """Unlock by closing."""
        for file in self._open:
            os.close(file)
        self._open.clear()

    def _lock(self, url: str, path: Path) -> str | None:
        try:
            # Not for writing: a disk with such a file cannot be made read-only.
            file = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise HistoryError(f"{path}: {error.strerror}; the lock of `gorgo tune` cannot be opened") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            pid = os.read(file, 20).decode(errors="replace").strip() or "unknown"
            os.close(file)
            if isinstance(error, BlockingIOError):
                return f"process {pid} tunes {url} with this history"
            raise HistoryError(f"{path}: {error.strerror}; the lock of `gorgo tune` cannot be taken") from error
        self._open.append(file)
        with suppress(OSError):  # for people: the lock itself is taken
            path.write_text(f"{os.getpid()}\n", encoding="ascii")
        return None


# Leadership by advisory locks of PostgreSQL, one per proxy, on a connection of their own.
#
# The locks belong to the connection: with it they are lost, at once and on both sides. The server ends a connection
# whose host has vanished after some ten seconds (TCP keepalive), and each query here has a time-out.


#: Of one query; the server answers from memory.
QUERY_S = 5.0
#: Of the server, for a client that vanished: idle, then three probes.
KEEPALIVE = {"tcp_keepalives_idle": 5, "tcp_keepalives_interval": 2, "tcp_keepalives_count": 3}
_LOST = "the connection with the advisory lock is lost"


class AdvisoryLock(Leadership):
    """Locks on the proxies of one tuner.

    Parameters
    ----------
    database:
        URL of the history. A pooler in front must not share connections between transactions.
    urls:
        Of the proxies.
    """

    has_standby = True

    def __init__(self, database: str, urls: Iterable[str]) -> None:
        self._engine = open_engine(database)
        self._keys = [lock_key(url) for url in sorted(urls)]
        #: The driver's own: SQLAlchemy's would connect again without a word, and without the locks.
        self._connection: DBAPIConnection | None = None
        self._failures = (SQLAlchemyError, TimeoutError, self._engine.dialect.loaded_dbapi.Error)

    async def try_to_lead(self) -> str | None:
        """Return None with all locks, otherwise why not."""
        try:
            async with asyncio.timeout(2 * QUERY_S):
                led = await asyncio.to_thread(self._lock)
        except self._failures as error:
            await self.release()
            return f"{shown(self._engine.url)} gives no lock: {type(error).__name__}"
        return None if led else "another process leads"

    async def confirm_leadership(self) -> None:
        """Ask the server on the connection of the locks."""
        if self._connection is None:
            raise LeadershipLost(_LOST)
        try:
            async with asyncio.timeout(QUERY_S):
                await asyncio.to_thread(_query, self._connection, "SELECT 1")
        except self._failures as error:
            await self.release()
            raise LeadershipLost(f"{_LOST}: {type(error).__name__}") from error

    async def release(self) -> None:
        """Close the connection, and its locks with it."""
        connection, self._connection = self._connection, None
        if connection is not None:
            _break(connection)
            connection.close()

    def _lock(self) -> bool:
        if self._connection is None:
            pooled = self._engine.raw_connection()
            pooled.detach()
            assert pooled.dbapi_connection is not None, "just connected"
            self._connection = pooled.dbapi_connection
            self._connection.autocommit = True
            for name, value in KEEPALIVE.items():
                _query(self._connection, f"SET {name} = {value}")
        for key in self._keys:
            if not _query(self._connection, f"SELECT pg_try_advisory_lock({key})"):
                _query(self._connection, "SELECT pg_advisory_unlock_all()")
                return False
        return True


def lock_key(url: str) -> int:
    """Return the key of a proxy's lock, a signed number of 64 bits."""
    return int.from_bytes(sha256(f"gorgo tune {url}".encode()).digest()[:8], signed=True)


def _query(connection: DBAPIConnection, query: str) -> Any:
    """Return the first value of the answer; None without one."""
    cursor = connection.cursor()
    try:
        cursor.execute(query)
        row = None if cursor.description is None else cursor.fetchone()
        return None if row is None else row[0]
    finally:
        cursor.close()


def _break(connection: DBAPIConnection) -> None:
    """End a query that a thread may still wait for: closing alone would wait for it too."""
    if getattr(connection, "closed", False):
        return
    with socket.socket(fileno=os.dup(connection.fileno())) as stream:
        try:
            stream.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the other side has closed it
