"""Changes of regions.yaml on disk, by polling or on request (SIGHUP).

Theory of operation: once a second the file's stamp (device, inode, size, times) is compared with that of the last
read. A new stamp must hold for one more poll before the file is read, so a half-written file is not read. Writes in
place, renames and relinked symlinks look the same. Only new content counts. Disk and parser run in a thread: a mount
that hangs delays a reload, never a stream.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from gorgo.config.load import read_text
from gorgo.config.model import Config
from gorgo.errors import ConfigError

#: An operator expects a reload within a second or two.
POLL_S = 1.0
#: Interval of two equal reads, after which a requested file is complete.
SETTLE_S = 0.05

#: The last line of a file that is to be refused where this line is missing: any cut loses it.
END = b"# end"
#: Fields of `os.stat`; `None` without a file.
FileStamp = tuple[int, ...]
#: The content, or the error of reading it.
Found = bytes | ConfigError


class ConfigFile:
    """One watched file.

    Parameters
    ----------
    path:
        A regular file or a link to one; anything else is an error.
    parse:
        Parses the content. Raises `ConfigError`.
    text:
        The content at the start.
    poll_s, settle_s:
        Interval of polls, and of the two reads of a requested reload.
    """

    def __init__(
        self,
        path: Path,
        parse: Callable[[bytes], Config],
        text: bytes,
        *,
        poll_s: float = POLL_S,
        settle_s: float = SETTLE_S,
    ) -> None:
        self._path = path
        self._parse = parse
        self._has_end = has_end(text)
        self._poll_s = poll_s
        self._settle_s = settle_s
        self._reload_requested = asyncio.Event()
        #: Number of the last request, and of the last one that a finished read is an answer to.
        self._requests = 0
        self.answered = 0
        self._reported = _comparable(text)
        #: Stamps of the last poll and of the last read; `()` equals no file's.
        self._polled: FileStamp | None = ()
        self._read_stamp: FileStamp | None = ()
        self._beside: Path | None = None
        self._beside_polled: FileStamp | None = None
        self._beside_read: FileStamp | None = None

    def request_reload(self) -> int:
        """Request a read now. Return the number of the request, which `answered` reaches with that read."""
        self._requests += 1
        self._reload_requested.set()
        return self._requests

    def watch_also(self, path: str | None) -> None:
        """Report the content again when the file at `path`, which it names, has changed."""
        beside = None if path is None else Path(path)
        if beside != self._beside:
            self._beside = beside
            self._beside_polled = self._beside_read = None if beside is None else file_stamp(beside)

    async def changed(self) -> Found:
        """Wait for new content or a request; return the content."""
        while True:
            if await self._wait_for_request(self._poll_s):
                number = self._requests
                content: Found | None = await self._read_stable()
                self.answered = number
            else:
                content = await self.poll()
                if content is None and await self._beside_changed():
                    content, self._read_stamp = await self._read_file()
            if content is not None:
                self._reported = _comparable(content)
                return content

    async def parse(self, content: Found) -> Config:
        """Parse in a thread. Raises `ConfigError`, also for a file that has lost the line of its end."""
        if isinstance(content, ConfigError):
            raise content
        if self._has_end and not has_end(content):
            raise ConfigError(
                f"{self._path}: the last line is not {END.decode()!r}, as it was: the file seems to be cut; "
                "a restart accepts it without this line"
            )
        config = await asyncio.to_thread(self._parse, content)
        self._has_end = has_end(content)
        return config

    async def _wait_for_request(self, limit_s: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._reload_requested.wait()
        requested = self._reload_requested.is_set()
        self._reload_requested.clear()
        return requested

    async def _read_stable(self) -> Found:
        """Return the content once two consecutive reads agree."""
        before, _ = await self._read_file()
        while True:
            await asyncio.sleep(self._settle_s)
            content, stamp = await self._read_file()
            if _comparable(content) == _comparable(before):
                self._polled = self._read_stamp = stamp
                return content
            before = content

    async def poll(self) -> Found | None:
        """Return new content whose stamp has held for one interval, else None."""
        stamp = await asyncio.to_thread(file_stamp, self._path)
        if stamp == self._read_stamp:
            return None
        if stamp != self._polled:
            self._polled = stamp
            return None
        content, stamp = await self._read_file()
        if stamp != self._polled:
            self._polled = stamp
            return None
        self._read_stamp = stamp
        return None if _comparable(content) == self._reported else content

    async def _beside_changed(self) -> bool:
        """Return whether the other file has a new stamp that has held for one interval."""
        if self._beside is None:
            return False
        before = self._beside_polled
        self._beside_polled = stamp = await asyncio.to_thread(file_stamp, self._beside)
        if stamp in (None, self._beside_read) or stamp != before:  # a file that is being replaced may be missing
            return False
        self._beside_read = stamp
        return True

    async def _read_file(self) -> tuple[Found, FileStamp | None]:
        """Read the content with its stamp; the stamp is `()` if it changed meanwhile."""
        return await asyncio.to_thread(_read_file, self._path)


def has_end(text: bytes) -> bool:
    """Return whether the last line that is not blank says that the file ends.

    >>> has_end(b"proxy: {}\\n# end\\n"), has_end(b"proxy: {}\\n# en")
    (True, False)
    """
    return text.rstrip().rpartition(b"\n")[2].strip() == END


def file_stamp(path: Path) -> FileStamp | None:
    """Return the stamp of a regular file, else None."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _read_file(path: Path) -> tuple[Found, FileStamp | None]:
    before = file_stamp(path)
    if before is None:
        return ConfigError(f"{path}: missing, or not a regular file; expected a regions.yaml file"), None
    try:
        text = read_text(path)
    except ConfigError as error:
        return error, before
    return text, before if file_stamp(path) == before else ()


def _comparable(content: Found) -> bytes | str:
    """Return the text of an error, by which errors compare."""
    return str(content) if isinstance(content, ConfigError) else content
