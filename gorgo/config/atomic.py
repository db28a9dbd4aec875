"""Atomic file writes: after a crash a file has its old or its new content."""

from __future__ import annotations

import errno
import io
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, TextIO

#: Readable by the owner alone: state and weights steer a proxy.
PRIVATE = 0o600
#: For public files; the umask applies.
PUBLIC = 0o666


def write_atomically(path: Path, content: bytes, *, mode: int = PRIVATE) -> None:
    """Replace the file at `path` by `content`; durable on return.

    Written beside the file, synced, renamed over it; then the folder is synced, because the new name is in there. A
    link is followed. A pipe, a terminal or /dev/null is written to and not replaced. Raises `OSError`, and the file is
    then as it was; only if it comes from that last sync is the new content there without a promise that it stays.
    """
    if _is_special(path):
        with path.open("wb") as file:
            file.write(content)
        return
    target = Path(os.path.realpath(path))
    # A fixed name: the next write removes the rest of a killed process.
    beside = target.with_name(f".{target.name}.new")
    try:
        _write_synced(beside, content, mode)
        os.replace(beside, target)
    except OSError:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)


def create_file(path: Path, *, mode: int = PUBLIC) -> BinaryIO:
    """Return a new, empty file at `path`, open for writing; whatever has that name is removed first.

    A link or a file that another user has put there is never written to. Raises `OSError`.
    """
    with suppress(FileNotFoundError):
        os.unlink(path)
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode), "wb")


def create_text_file(path: Path, *, mode: int = PUBLIC) -> TextIO:
    """Return the file of `create_file` for UTF-8 text."""
    return io.TextIOWrapper(create_file(path, mode=mode), encoding="utf-8")


def _is_special(path: Path) -> bool:
    """Return whether `path` is no regular file, which a rename would replace for every program."""
    try:
        return not stat.S_ISREG(os.stat(path).st_mode)
    except FileNotFoundError:
        return False


def _write_synced(path: Path, content: bytes, mode: int) -> None:
    with create_file(path, mode=mode) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems have no such thing, and need none
            raise
    finally:
        os.close(descriptor)
