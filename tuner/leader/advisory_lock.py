"""Leadership by advisory locks of PostgreSQL, one per proxy, on a connection of their own.

The locks belong to the connection: with it they are lost, at once and on both sides. The server ends a connection whose
host has vanished after some ten seconds (TCP keepalive), and each query here has a time-out.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterable
from hashlib import sha256
from typing import Any

from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import SQLAlchemyError

from gorgo.errors import LeadershipLost
from tuner.history.database import open_engine, shown
from tuner.leader.candidate import Leadership

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
