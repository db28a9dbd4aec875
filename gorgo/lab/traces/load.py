"""Reading a trace from disk: JSON lines, plain or gzip (by its first bytes, not by its name).

A file is streamed line by line: only requests that pass the filters stay in memory.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

from gorgo.errors import TraceError
from gorgo.lab.traces.filters import TraceFilters
from gorgo.lab.traces.rows import TraceRequest, read_row

GZIP_MAGIC = b"\x1f\x8b"
#: Longest line that is read. A body of a million tokens is some 4 MB; a file without line ends must not fill memory.
LINE_BYTES_MAX = 64 * 1024 * 1024
#: In a row. A gigabyte of them is a megabyte of gzip, and the better part of a minute.
BLANK_MAX = 1024 * 1024

#: A year. Time stamps in another unit, or one that is wrong, would keep a simulation busy for ever.
SPAN_S_MAX = 366 * 86_400.0


def load_trace(path: Path | str, filters: TraceFilters | None = None) -> list[TraceRequest]:
    """The requests that `filters` keep, in order of time, the first at 0.

    Raises `TraceError` for a file that cannot be read, a line that cannot be replayed, or when nothing is left.

    Example
    -------
    >>> from gorgo.lab.datasets.catalogue import shipped_path
    >>> requests = load_trace(shipped_path("chat-small"), TraceFilters(limit=60, max_input=24_000))
    >>> len(requests), requests[0].timestamp_s
    (60, 0.0)
    """
    path = Path(path)
    requests = (filters or TraceFilters()).apply(read_requests(path))
    if not requests:
        raise TraceError(f"{path}: no request is left after the filters")
    return requests


def read_requests(path: Path) -> Iterator[TraceRequest]:
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
        request = read_row(text, file=str(path), line_number=line_number, index=index)
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
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path}: damaged gzip file ({error})") from None
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None


def _decoded(line: bytes, path: Path, number: int) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}, line {number}: not UTF-8 ({error.reason} at byte {error.start})") from None


def _opened(path: Path) -> IO[bytes]:
    """Raise for a pipe: the file is opened twice, and a pipe without a writer blocks for ever."""
    if path.is_fifo():
        raise TraceError(f"{path}: a pipe; expected a file, because a trace is opened twice")
    with path.open("rb") as file:
        magic = file.read(len(GZIP_MAGIC))
    return cast(IO[bytes], gzip.open(path) if magic == GZIP_MAGIC else path.open("rb"))
