"""Files that are either as they were or as they should be, whatever ends the process while it writes them."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

#: Readable by its owner alone: what is written this way steers a proxy.
_MODE = 0o600


def write_atomically(path: Path, content: bytes) -> None:
    """Put `content` in place of the file at `path`; on return it outlives a loss of power.

    Written beside the file, synced, renamed over it; then the folder is synced, because the new name is in there. A
    link is followed. Raises `OSError`, and the file is then as it was; only if it comes from that last sync is the new
    content there without a promise that it stays.
    """
    target = Path(os.path.realpath(path))
    # One name for ever: what a killed process leaves behind is written over by the next.
    beside = target.with_name(f".{target.name}.new")
    try:
        _write_synced(beside, content)
        os.replace(beside, target)
    except OSError:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)


def _write_synced(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, _MODE)
    with open(descriptor, "wb") as file:
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
