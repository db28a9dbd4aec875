"""Log files of the proxy as lines of JSON, with a bound on each line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gorgo.errors import TraceError

#: A prompt of ten million tokens; a file without line ends must not fill memory.
MAX_LINE_BYTES = 4 << 20


def read_lines(path: Path, expected: str) -> Iterator[bytes]:
    """Yield the lines of a file; raise `TraceError`, which says what was `expected`, for one that is too long."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), start=1):
                if len(line) > MAX_LINE_BYTES:
                    raise TraceError(f"{path}, line {number}: over {MAX_LINE_BYTES:,} bytes; expected {expected}")
                yield line
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}; expected {expected}") from None


def json_object(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a line; `None` if it is none."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None
