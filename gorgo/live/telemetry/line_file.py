"""A log on disk: JSON lines in a bounded set of files.

`FILE` is rotated to `FILE.1`, `FILE.2` and so on; the oldest is removed. Each file, and each run within it, begins with
a header. A truncated line (`kill -9`, full disk) is followed by a header or by nothing.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from gorgo.errors import ConfigError

#: Readable for the owner alone: lengths and times are private.
_MODE = 0o600


class Line(Protocol):
    """An entry of a log."""

    def as_line(self) -> str:
        """Return the JSON line, with its end."""


class LineFile:
    """Appends lines; every call blocks until the disk is done.

    Parameters
    ----------
    path:
        The file may be missing; its folder must exist.
    header:
        First line of each file and each run.
    kind:
        Names the log in errors, as `a request log`.
    max_bytes, max_files:
        Bounds of rotation.
    """

    def __init__(self, path: Path, header: Mapping[str, Any], *, kind: str, max_bytes: int, max_files: int) -> None:
        self.path = path
        self._header = json.dumps(header).encode() + b"\n"
        self._kind = kind
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._descriptor: int | None = None
        self._size = 0

    def open(self) -> None:
        """Open the file at the start. Raises `ConfigError` for a wrong path."""
        try:
            self._open()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            expected = "expected a file, or a new name in an existing folder"
            raise ConfigError(f"{self.path}: cannot write {self._kind}: {reason}; {expected}") from error

    def write(self, lines: Iterable[Line]) -> None:
        """Append the lines. Raises `OSError`; then some lines may be written, the last one truncated."""
        text = "".join([line.as_line() for line in lines]).encode()
        if self._descriptor is not None and self._size + len(text) > self._max_bytes and self._size > len(self._header):
            self._rotate()
        if self._descriptor is None:
            self._open()
        try:
            self._append(text)
        except OSError:
            self.close()  # the next write begins with a header, after a possible half line
            raise

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> None:
        # Nonblocking: a pipe would block until a reader comes.
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
        descriptor = os.open(self.path, flags, _MODE)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise ValueError("not a regular file")
            complete = found.st_size == 0 or os.pread(descriptor, 1, found.st_size - 1) == b"\n"
        except (OSError, ValueError):
            os.close(descriptor)
            raise
        self._descriptor, self._size = descriptor, found.st_size
        try:
            self._append(self._header if complete else b"\n" + self._header)
        except OSError:
            self.close()
            raise

    def _append(self, text: bytes) -> None:
        assert self._descriptor is not None
        rest = memoryview(text)
        while rest:
            written = os.write(self._descriptor, rest)
            self._size += written
            rest = rest[written:]

    def _rotate(self) -> None:
        self.close()
        for number in range(self._max_files - 2, 0, -1):
            with suppress(FileNotFoundError):
                os.replace(self._numbered(number), self._numbered(number + 1))
        if self._max_files > 1:
            os.replace(self.path, self._numbered(1))
        else:
            os.unlink(self.path)

    def _numbered(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")
