"""The request log on disk: one JSON line per finished request, in a bounded set of files. No prompt, no key.

Owns the form and the rotation. `FILE` is written to; when it is full it becomes `FILE.1`, that one `FILE.2`, and what
would be one too many goes. Collecting lines is `request_log`'s, reading them `gorgo.apps.request_log`'s.

Theory of operation: `received_s` is wall-clock time, so that lines go on from one file, and from one run, to the next.
Block hashes are those of the prefix index, every eighth: each stands for the whole prefix up to its end, so that every
eighth says what a trace says in an eighth of the space. The fingerprint's key is drawn anew by each run and stays in
it; hashes of two runs have nothing in common. Therefore a header, with the run's `boot_id`, stands at the head of each
file and wherever a run begins. A line that was cut off (by `kill -9`, a full disk) has a header after it, or nothing.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gorgo.errors import ConfigError

SCHEMA = 1
#: Blocks of the prefix index per hash in the log: 512 tokens of 4 bytes, as in Mooncake's traces.
BLOCKS_PER_HASH = 8
#: A day of five requests a second with prompts of 2,000 tokens; five of them are a week on a laptop's disk.
MAX_FILE_BYTES = 64 << 20
MAX_FILES = 5
#: Hashes are of no use without the key, but lengths and times are the clients' business.
_MODE = 0o600


@dataclass(frozen=True, slots=True)
class Finished:
    """One request that has ended, however it did.

    Parameters
    ----------
    received_s:
        Wall-clock time, seconds since the epoch.
    model:
        Asked for; `None` if none was, or if the name is too long to be one.
    input_tokens:
        As the engine counted, or estimated.
    output_tokens:
        As the engine counted; `None` if it did not tell.
    text_bytes:
        Of the prompt: with `input_tokens` it tells where in the tokens a hash lies.
    status:
        Of HTTP, 499 if the client went away.
    hashes:
        8 bytes per hash, little-endian.
    """

    received_s: float
    model: str | None
    input_tokens: int
    output_tokens: int | None
    text_bytes: int
    status: int
    hashes: bytes

    def line(self) -> str:
        """As JSON, with the end of line."""
        output = "null" if self.output_tokens is None else str(self.output_tokens)
        # All hashes of a prompt at once: one by one they would take most of the time.
        words = np.frombuffer(self.hashes, dtype="<u8").byteswap().tobytes().hex("-", 8).replace("-", '", "')
        hashes = f'["{words}"]' if words else "[]"
        return (
            f'{{"received_s": {self.received_s:.4f}, "model": {json.dumps(self.model)},'
            f' "input_tokens": {self.input_tokens}, "output_tokens": {output}, "text_bytes": {self.text_bytes},'
            f' "status": {self.status}, "block_hashes": {hashes}}}\n'
        )


class RequestLogFile:
    """Appends lines; every call blocks for as long as the disk takes.

    Parameters
    ----------
    path:
        A file that need not be there yet, in a folder that is.
    boot_id:
        Of this run.
    clock:
        Wall-clock seconds, for the header.
    block_bytes:
        Text per hash.
    max_bytes, max_files:
        Bounds: so many files of about so many bytes.
    """

    def __init__(
        self,
        path: Path,
        *,
        boot_id: str,
        clock: Callable[[], float],
        block_bytes: int,
        max_bytes: int = MAX_FILE_BYTES,
        max_files: int = MAX_FILES,
    ) -> None:
        self.path = path
        header = {
            "gorgo_request_log": SCHEMA,
            "boot_id": boot_id,
            "started_s": round(clock(), 4),
            "block_bytes": block_bytes,
        }
        self._header = json.dumps(header).encode() + b"\n"
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._descriptor: int | None = None
        self._size = 0

    def open(self) -> None:
        """Find out at the start whether the path is right; raises `ConfigError`."""
        try:
            self._open()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            expected = "expected a file, or a new name in a folder that is there"
            raise ConfigError(f"{self.path}: no request log can be written there: {reason}; {expected}") from error

    def write(self, requests: Iterable[Finished]) -> None:
        """Append a line for each. Raises `OSError`; some of them may then be there, the last cut off."""
        text = "".join([request.line() for request in requests]).encode()
        if self._descriptor is not None and self._size + len(text) > self._max_bytes and self._size > len(self._header):
            self._rotate()
        if self._descriptor is None:
            self._open()
        try:
            self._append(text)
        except OSError:
            self.close()  # the next write begins with a header, after what may be half a line
            raise

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> None:
        # Without waiting: a pipe would keep us until somebody reads it.
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        descriptor = os.open(self.path, flags, _MODE)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise ValueError("it is no regular file")
            whole = found.st_size == 0 or os.pread(descriptor, 1, found.st_size - 1) == b"\n"
        except (OSError, ValueError):
            os.close(descriptor)
            raise
        self._descriptor, self._size = descriptor, found.st_size
        try:
            self._append(self._header if whole else b"\n" + self._header)
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
