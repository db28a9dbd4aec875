"""regions.yaml as it lies on the disk: when its content has changed and come to rest, or somebody asks for it.

Owns the looking. What the text means is `config.load`'s, what to do about it `reload`'s.

Theory of operation: once a second the file's stamp (device, inode, size, times) is compared with the one at which it
was last read. A new stamp has to stand for one more look before the file is read, so that a file that is being written
is left alone; whether it is written in place, replaced by rename or reached by a link that is turned over makes no
difference. What was read counts only if its content is new. Disk and parser are kept off the event loop, in a thread: a
mount that hangs delays a reload, never a stream.
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

#: A person who has saved the file looks at the log no sooner.
POLL_S = 1.0
#: Whoever asks has written the file; two equal reads so far apart tell that it is whole.
SETTLE_S = 0.05

#: What `os.stat` tells of a content; `None` if there is no such file.
FileStamp = tuple[int, ...]
#: The content, or why there is none.
Found = bytes | ConfigError


class ConfigFile:
    """One file, watched.

    Parameters
    ----------
    path:
        A regular file, or a link to one; anything else reads as an error.
    parse:
        Makes a configuration of its content, or raises `ConfigError`.
    text:
        The content that is in force at the start.
    poll_s, settle_s:
        Between two looks without and with somebody having asked.
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
        self._poll_s = poll_s
        self._settle_s = settle_s
        self._reload_requested = asyncio.Event()
        self._reported = _words(text)
        #: Stamps of the last look and of the last read; `()` is like no file's.
        self._seen: FileStamp | None = ()
        self._read: FileStamp | None = ()

    def request_reload(self) -> None:
        """Have the file read now, changed or not; for a signal handler."""
        self._reload_requested.set()

    async def changed(self) -> Found:
        """Wait until the file holds something new, or is asked for."""
        while True:
            found = await self._read_stable() if await self._wait_for_request(self._poll_s) else await self.poll()
            if found is not None:
                self._reported = _words(found)
                return found

    async def parse(self, found: Found) -> Config:
        """Raises `ConfigError`."""
        if isinstance(found, ConfigError):
            raise found
        return await asyncio.to_thread(self._parse, found)

    async def _wait_for_request(self, limit_s: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._reload_requested.wait()
        asked = self._reload_requested.is_set()
        self._reload_requested.clear()
        return asked

    async def _read_stable(self) -> Found:
        """Its content as soon as two reads in a row agree."""
        before, _ = await self._take()
        while True:
            await asyncio.sleep(self._settle_s)
            found, stamp = await self._take()
            if _words(found) == _words(before):
                self._seen = self._read = stamp
                return found
            before = found

    async def poll(self) -> Found | None:
        """What is new, if anything is and has been for a whole look."""
        stamp = await asyncio.to_thread(file_stamp, self._path)
        if stamp == self._read:
            return None
        if stamp != self._seen:
            self._seen = stamp
            return None
        found, stamp = await self._take()
        if stamp != self._seen:
            self._seen = stamp
            return None
        self._read = stamp
        return None if _words(found) == self._reported else found

    async def _take(self) -> tuple[Found, FileStamp | None]:
        """The content and the stamp it had before and after; a stamp like no file's if these differ."""
        return await asyncio.to_thread(_take, self._path)


def file_stamp(path: Path) -> FileStamp | None:
    """Equal as long as nobody has touched the file; `None` when it is none that can be watched."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    if not stat.S_ISREG(found.st_mode):
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _take(path: Path) -> tuple[Found, FileStamp | None]:
    before = file_stamp(path)
    if before is None:
        return ConfigError(f"{path}: is not there, or no regular file; expected a regions.yaml file"), None
    try:
        text = read_text(path)
    except ConfigError as error:
        return error, before
    return text, before if file_stamp(path) == before else ()


def _words(found: Found) -> bytes | str:
    """Errors compare by what they say."""
    return str(found) if isinstance(found, ConfigError) else found
