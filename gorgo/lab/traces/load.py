"""Reading a trace from disk: JSON lines, plain or as gzip, bzip2 or xz (by its first bytes, not by its name).

A file is streamed line by line: only requests that pass the filters stay in memory.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from gorgo.errors import TraceError
from gorgo.lab.traces.filters import TraceFilters
from gorgo.lab.traces.rows import BLOCK_TOKENS, TraceRequest, read_row

#: First bytes of compressed files, with the name of the form and what opens it.
_COMPRESSED: tuple[tuple[bytes, str, Callable[[Path], Any]], ...] = (
    (b"\x1f\x8b", "gzip", gzip.open),
    (b"BZh", "bzip2", bz2.open),
    (b"\xfd7zXZ\x00", "xz", lzma.open),
)
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
#: First bytes of every compressed file that is known here.
COMPRESSED = (*(magic for magic, _, _ in _COMPRESSED), _ZSTD_MAGIC)
#: Longest line that is read. A body of a million tokens is some 4 MB; a file without line ends must not fill memory.
LINE_BYTES_MAX = 64 * 1024 * 1024
#: In a row. A gigabyte of them is a megabyte of gzip, and the better part of a minute.
BLANK_MAX = 1024 * 1024

#: A year. Time stamps in another unit, or one that is wrong, would keep a simulation busy for ever.
SPAN_S_MAX = 366 * 86_400.0


def load_trace(
    path: Path | str, filters: TraceFilters | None = None, *, block_tokens: int | None = None
) -> list[TraceRequest]:
    """The requests that `filters` keep, in order of time, the first at 0; an id is of `block_tokens` tokens.

    None: as many as the first row names, or 512.

    Raises `TraceError` for a file that cannot be read, a line that cannot be replayed, or when nothing is left.

    Example
    -------
    >>> from gorgo.lab.datasets.catalogue import shipped_path
    >>> requests = load_trace(shipped_path("chat-small"), TraceFilters(limit=60, max_input=24_000))
    >>> len(requests), requests[0].timestamp_s
    (60, 0.0)
    """
    path = Path(path)
    requests = (filters or TraceFilters()).apply(read_requests(path, block_tokens=block_tokens))
    if not requests:
        raise TraceError(f"{path}: no request is left after the filters")
    return requests


def file_block_tokens(path: Path) -> int:
    """Return the tokens of a block of ids by the first row; 512 where it names none, or cannot be read."""
    try:
        first = next(read_requests(path), None)
    except TraceError:
        return BLOCK_TOKENS  # a run of the file says what is wrong
    return BLOCK_TOKENS if first is None else first.block_tokens


def read_requests(path: Path, *, block_tokens: int | None = None) -> Iterator[TraceRequest]:
    """Every request of the file as it stands there, lazily; empty lines are skipped."""
    index, origin_s, blank = 0, 0.0, 0
    for line_number, text in enumerate(_lines(path), start=1):
        blank = 0 if text.strip() else blank + len(text)
        if blank > BLANK_MAX:
            raise TraceError(
                f"{path}, line {line_number}: over {BLANK_MAX:,} bytes of blank lines; expected JSON lines"
            )
        if blank:
            continue
        request = read_row(text, file=str(path), line_number=line_number, index=index, block_tokens=block_tokens)
        block_tokens = request.block_tokens
        origin_s = origin_s if index else request.timestamp_s
        if not abs(request.timestamp_s - origin_s) <= SPAN_S_MAX:
            away = f"{request.timestamp_s - origin_s:,.0f} s from the first request"
            raise TraceError(f"{path}, line {line_number}: {away}; expected a year at most, in milliseconds")
        yield request
        index += 1


def _lines(path: Path) -> Iterator[str]:
    try:
        with _opened(path) as file:
            for number, line in enumerate(iter(lambda: file.readline(LINE_BYTES_MAX + 1), b""), start=1):
                if len(line) > LINE_BYTES_MAX:
                    raise TraceError(f"{path}, line {number}: over {LINE_BYTES_MAX:,} bytes; expected JSON lines")
                yield _decoded(line, path, number)
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        raise TraceError(f"{path}: damaged {_form(path)} file ({error})") from None
    except OSError as error:  # without a number from the modules that unpack
        said = error.strerror or (f"damaged {_form(path)} file ({error})" if error.errno is None else str(error))
        raise TraceError(f"{path}: {said}") from None


def _decoded(line: bytes, path: Path, number: int) -> str:
    """Return the text of a line, without the byte order mark that some programs write before the first."""
    if number == 1:
        line = line.removeprefix(codecs.BOM_UTF8)
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}, line {number}: not UTF-8 ({error.reason} at byte {error.start})") from None


def _opened(path: Path) -> IO[bytes]:
    """Raise for a pipe: the file is opened twice, and a pipe without a writer blocks for ever."""
    if path.is_fifo():
        raise TraceError(f"{path}: a pipe; expected a file, because a trace is opened twice")
    found = _compression(path)
    if found is None:
        return path.open("rb")
    opened: IO[bytes] = found[1](path)
    return opened


def _form(path: Path) -> str:
    found = _compression(path)
    return "or changed" if found is None else found[0]


def _compression(path: Path) -> tuple[str, Callable[[Path], Any]] | None:
    """Return the name of a file's compression and what opens it; None for a plain file. Raises for zstd."""
    with path.open("rb") as file:
        start = file.read(8)
    if start.startswith(_ZSTD_MAGIC):
        raise TraceError(
            f"{path}: compressed by zstd; expected JSON lines, plain or as gzip, bzip2 or xz (`zstd -d` unpacks it)"
        )
    return next(((name, opener) for magic, name, opener in _COMPRESSED if start.startswith(magic)), None)
