"""A process that reads large bodies: a parse holds its process, and in this one nothing else waits for it.

A job is a route and a body; its answer is a `BodyFields` or a refusal. In the place of a route, which begins with a
slash, a coding and a bound may stand: the answers are then the pieces of the unpacked body, or a refusal. See `workers`
for the other end.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

from gorgo.core.prompt.fingerprint import Fingerprinter
from gorgo.live.helper_worker import Work, run_worker
from gorgo.live.http.errors import HttpError
from gorgo.live.parsing.json_body import BodyFields, limit_digits, read_large_body, unpack

#: Frames of a job.
FRAMES = 2
#: Data of this process. The largest body that the counts admit takes some hundred MiB.
MAX_MEMORY_BYTES = 1024 * 1024 * 1024

#: Status, code and message of a refusal.
Refused = tuple[int, str, str]


def reader(fingerprinter: Fingerprinter) -> Work:
    """Return what reads or unpacks one body."""

    def read(task: bytes, body: bytes) -> Iterator[BodyFields | bytes | Refused]:
        if task.startswith(b"/"):
            yield _read(task.decode(), body, fingerprinter)
        else:
            yield from _unpack(task.decode(), body)

    return read


def _read(route: str, body: bytes, fingerprinter: Fingerprinter) -> BodyFields | Refused:
    try:
        return read_large_body(route, body, fingerprinter)
    except HttpError as error:
        return error.status, error.code, error.message
    except MemoryError:
        return 413, "request_too_large", f"the body takes more than {MAX_MEMORY_BYTES} bytes to read"


def _unpack(task: str, body: bytes) -> Iterator[bytes | Refused]:
    coding, limit = task.split()
    try:
        yield from unpack(coding, body, limit=int(limit))
    except HttpError as error:
        yield error.status, error.code, error.message


def main() -> None:
    """Read bodies until the standard input ends."""
    limit_digits()
    gc.disable()  # a parsed body has no cycles, and millions of objects would be visited again and again
    run_worker(reader, frames=FRAMES, max_memory_bytes=MAX_MEMORY_BYTES)


if __name__ == "__main__":
    main()
