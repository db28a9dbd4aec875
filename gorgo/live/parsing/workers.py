"""Processes that read large bodies, one per lane: a body of many numbers delays no long text.

Owns the processes and the order of their jobs. A process starts with its lane's first job, and is replaced after a
failure. The event loop only passes bytes, in pieces.
"""

from __future__ import annotations

import asyncio
import pickle
from asyncio.subprocess import Process

from gorgo.core.json_cost import count_values
from gorgo.core.prompt.fingerprint import Fingerprinter
from gorgo.live.helper_process import end_helper, start_helper
from gorgo.live.http.errors import HttpError
from gorgo.live.parsing.fields import BodyFields
from gorgo.live.parsing.json_body import MAX_VALUES, too_many_values
from gorgo.live.parsing.worker import JOB, LENGTH, Refused, encode

#: Values of a body in the lane of texts: some tenths of a second.
TEXT_VALUES = 200_000
#: Bodies in one lane, the one in progress included: more would wait for longer than a client does.
MAX_WAITING = 32
#: Time for one body, a start of its process included; the largest takes about 4 s.
JOB_TIMEOUT_S = 30.0
_PIECE_BYTES = 256 * 1024
#: Counted in one turn of the event loop: about a millisecond.
_COUNTED_BYTES = 1024 * 1024
#: Added to the proxy's own: where processors are few, the event loop goes first.
NICENESS = 10
_RETRY_SOON = ((b"retry-after", b"1"),)


class BodyWorkers:
    """Two lanes: long texts, and bodies of many values."""

    def __init__(self, fingerprinter: Fingerprinter) -> None:
        self._texts, self._values = _Lane(fingerprinter), _Lane(fingerprinter)

    async def read(self, route: str, body: bytes) -> BodyFields:
        """Read a body. Raises `HttpError`: 400 if it is refused, 429 if too many wait, 500 if the process failed."""
        values = await _count_values(body)
        if values > MAX_VALUES:
            raise too_many_values()
        lane = self._values if values > TEXT_VALUES else self._texts
        return await lane.read(route, body)

    async def aclose(self) -> None:
        for lane in (self._texts, self._values):
            await lane.aclose()


async def _count_values(body: bytes) -> int:
    """Count the values of a body, other tasks running in between."""
    count = 0
    for start in range(0, len(body), _COUNTED_BYTES):
        count += count_values(body[start : start + _COUNTED_BYTES])
        await asyncio.sleep(0)
    return count


class _Lane:
    """One process, and its jobs one after the other."""

    def __init__(self, fingerprinter: Fingerprinter) -> None:
        self._fingerprinter = fingerprinter
        self._process: Process | None = None
        self._lock = asyncio.Lock()
        self._waiting = 0

    async def read(self, route: str, body: bytes) -> BodyFields:
        if self._waiting >= MAX_WAITING:
            message = f"{MAX_WAITING} large bodies are being read, the limit of this proxy"
            raise HttpError(429, "too_many_in_flight", message, headers=_RETRY_SOON)
        self._waiting += 1
        try:
            async with self._lock:
                result = await self._job(route, body)
        finally:
            self._waiting -= 1
        if isinstance(result, tuple):
            status, code, message = result
            raise HttpError(status, code, message)
        return result

    async def _job(self, route: str, body: bytes) -> BodyFields | Refused:
        whole = False
        try:
            async with asyncio.timeout(JOB_TIMEOUT_S):
                process = self._process or await self._start()
                result = await _exchange(process, route, body)
            whole = True
            return result
        except (OSError, EOFError):  # a timeout is an OSError
            raise HttpError(500, "internal_error", "the body could not be read") from None
        finally:
            if not whole:
                await self.aclose()

    async def _start(self) -> Process:
        process = await start_helper("gorgo.live.parsing.worker", niceness=NICENESS)
        self._process = process
        assert process.stdin is not None
        process.stdin.write(encode(self._fingerprinter))
        return process

    async def aclose(self) -> None:
        """End the process; the next job starts another."""
        process, self._process = self._process, None
        if process is not None:
            await end_helper(process)


async def _exchange(process: Process, route: str, body: bytes) -> BodyFields | Refused:
    """Pass a job to the process and return its result. Raises `OSError` or `EOFError` if the process failed."""
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None
    assert stdout is not None
    name, pieces = route.encode(), memoryview(body)
    stdin.write(JOB.pack(len(name), len(body)) + name)
    for start in range(0, len(body), _PIECE_BYTES):
        stdin.write(bytes(pieces[start : start + _PIECE_BYTES]))
        await stdin.drain()
    (size,) = LENGTH.unpack(await stdout.readexactly(LENGTH.size))
    result: BodyFields | Refused = pickle.loads(await stdout.readexactly(size))
    return result
