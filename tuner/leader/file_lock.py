"""Leadership on one host: a lock file per proxy beside the history in SQLite.

The system releases the lock with its process, however that ends. The files stay: removing one would give two processes
a lock each.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from gorgo.errors import HistoryError
from tuner.leader.candidate import Leadership

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
