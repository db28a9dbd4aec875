"""A process that reads large bodies: a parse holds its process, and in this one nothing else waits for it.

Owns the form of what passes between the two processes, and the loop of this one. See `workers` for the other end.

Theory of operation. First comes the fingerprinter. Then each job is a route and a body; its result is a `BodyFields`
or a refusal. The process ends at the end of its input, so it never outlives its parent, and it ignores the signals
that stop its parent, which may still need it.
"""

from __future__ import annotations

import gc
import pickle
import resource
import signal
import struct
import sys
from typing import BinaryIO

from gorgo.core.prompt.fingerprint import Fingerprinter
from gorgo.live.http.errors import HttpError
from gorgo.live.parsing.fields import BodyFields, read_large_body
from gorgo.live.parsing.json_body import limit_digits

#: Lengths of a route and a body.
JOB = struct.Struct("!IQ")
#: Length of a pickle: of the fingerprinter, or of a result. Both ends are this program's own.
LENGTH = struct.Struct("!Q")

#: Data of this process. The largest body that the counts admit takes some hundred MiB.
MAX_MEMORY_BYTES = 1024 * 1024 * 1024

#: Status, code and message of a refusal.
Refused = tuple[int, str, str]


def encode(value: Fingerprinter | BodyFields | Refused) -> bytes:
    """Return a value with its length before it."""
    data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(data)) + data


def work(jobs: BinaryIO, results: BinaryIO) -> None:
    """Read bodies from `jobs` and write results until `jobs` ends."""
    (size,) = LENGTH.unpack(jobs.read(LENGTH.size))
    fingerprinter: Fingerprinter = pickle.loads(jobs.read(size))
    while len(head := jobs.read(JOB.size)) == JOB.size:
        route_size, body_size = JOB.unpack(head)
        route = jobs.read(route_size).decode()
        body = jobs.read(body_size)
        if len(body) < body_size:
            return
        results.write(encode(_read(route, body, fingerprinter)))
        results.flush()


def _read(route: str, body: bytes, fingerprinter: Fingerprinter) -> BodyFields | Refused:
    try:
        return read_large_body(route, body, fingerprinter)
    except HttpError as error:
        return error.status, error.code, error.message
    except MemoryError:
        return 413, "request_too_large", f"the body takes more than {MAX_MEMORY_BYTES} bytes to read"


def main() -> None:
    """Work on the standard streams."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    limit_digits()
    gc.disable()  # a parsed body has no cycles, and millions of objects would be visited again and again
    work(sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
