"""The request log on disk: one JSON line per finished request, in a bounded set of files. No prompt, no key.

`line_log` owns the writing and the rotation; `gorgo.lab.request_log` reads the files.

Theory of operation: `received_s` is wall-clock time, so lines of several files and runs are in one order. Block hashes
are every eighth of the prefix index; each covers the whole prefix up to its end. The fingerprint's key is drawn per
run, so hashes of two runs do not compare. Each file, and each run within it, therefore begins with a header that has
the run's `boot_id`. A truncated line (`kill -9`, full disk) is followed by a header or by nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from json.encoder import encode_basestring_ascii
from pathlib import Path

import msgspec
import numpy as np

from gorgo.core.record import record
from gorgo.live.telemetry.line_log import LineFile

SCHEMA = 1
#: Blocks of the prefix index per hash in the log: 512 tokens of 4 bytes, as in Mooncake's traces.
BLOCKS_PER_HASH = 8
#: One day of five requests a second with prompts of 2,000 tokens.
MAX_FILE_BYTES = 64 << 20
MAX_FILES = 5
_ENCODE = msgspec.json.Encoder().encode


@record
class Finished:
    """One finished request, with any result.

    Parameters
    ----------
    received_s:
        Wall-clock time, seconds since the epoch.
    model:
        `None` if the request names none, or a name that is too long.
    input_tokens:
        The engine's count, or an estimate.
    output_tokens:
        The engine's count; `None` without a report.
    text_bytes:
        Bytes of the prompt: with `input_tokens` they place a hash among the tokens.
    status:
        HTTP status; 499 if the client disconnected.
    hashes:
        8 bytes per hash, little-endian.
    client:
        Name of its key; `None` while clients need none.
    replica, cached_tokens, attempts:
        Of the last attempt; `None` where unknown. One attempt is a request without retry and hedge.
    boundaries:
        Tokens at the end of each message, of the `input_tokens`.
    queued_s, ttft_s, e2e_s:
        From `received_s` to the dispatch, the first token, the end; `None` without.
    """

    received_s: float
    model: str | None
    input_tokens: int
    output_tokens: int | None
    text_bytes: int
    status: int
    hashes: bytes
    client: str | None = None
    replica: str | None = None
    cached_tokens: int | None = None
    attempts: int = 0
    queued_s: float | None = None
    ttft_s: float | None = None
    e2e_s: float | None = None
    boundaries: Sequence[int] = ()

    def as_line(self) -> str:
        """Return the JSON line."""
        # All hashes at once: one by one they take most of the time.
        words = np.frombuffer(self.hashes, dtype="<u8").byteswap().tobytes().hex("-", 8).replace("-", '", "')
        hashes = f'["{words}"]' if words else "[]"
        boundaries = _ENCODE(self.boundaries).decode().replace(",", ", ")  # by `repr` it takes half of the line's time
        return (
            f'{{"received_s": {self.received_s:.4f}, "model": {_text(self.model)}, "client": {_text(self.client)},'
            f' "input_tokens": {self.input_tokens}, "output_tokens": {_number(self.output_tokens)},'
            f' "text_bytes": {self.text_bytes}, "status": {self.status}, "replica": {_text(self.replica)},'
            f' "cached_tokens": {_number(self.cached_tokens)}, "attempts": {self.attempts},'
            f' "queued_s": {_seconds(self.queued_s)}, "ttft_s": {_seconds(self.ttft_s)},'
            f' "e2e_s": {_seconds(self.e2e_s)}, "boundaries": {boundaries}, "block_hashes": {hashes}}}\n'
        )


class RequestLogFile(LineFile):
    """The files of the request log.

    Parameters
    ----------
    boot_id:
        Of this run.
    clock:
        Wall-clock seconds, for the header.
    block_bytes:
        Text per hash.
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
        header = {
            "gorgo_request_log": SCHEMA,
            "boot_id": boot_id,
            "started_s": round(clock(), 4),
            "block_bytes": block_bytes,
        }
        super().__init__(path, header, kind="a request log", max_bytes=max_bytes, max_files=max_files)


def logged_hashes(blocks: bytes) -> bytes:
    """Return the hashes of a fingerprint that a line has: every eighth.

    >>> len(logged_hashes(bytes(8 * 20)))
    16
    """
    if len(blocks) < 8 * BLOCKS_PER_HASH:
        return b""
    return np.frombuffer(blocks, dtype="<u8")[BLOCKS_PER_HASH - 1 :: BLOCKS_PER_HASH].tobytes()


def _text(text: str | None) -> str:
    return "null" if text is None else encode_basestring_ascii(text)


def _number(count: int | None) -> str:
    return "null" if count is None else str(count)


def _seconds(seconds: float | None) -> str:
    return "null" if seconds is None else repr(float(round(seconds, 4)))
