"""Processes that read and unpack large bodies, one per lane: a body of many numbers delays no long text.

Owns the lanes, and which body goes to which of them. Leaves the processes to `helper_process`: a body whose process
ends is read again by the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO

from gorgo.core.numeric import count_values
from gorgo.core.prompt.fingerprint import Fingerprinter
from gorgo.live.helper_process import HelperFailed, HelperProcess
from gorgo.live.http.errors import HttpError
from gorgo.live.parsing.json_body import MAX_VALUES, BodyFields, too_many_values
from gorgo.live.parsing.unpacking import unpack_quick
from gorgo.live.parsing.worker import Refused

#: Values of a body in the lane of texts: some tenths of a second.
TEXT_VALUES = 200_000
#: Bodies in one lane, the one in progress included: more would wait for longer than a client does.
MAX_WAITING = 32
#: Time for one body, a start of its process included; the largest takes about 4 s.
JOB_TIMEOUT_S = 30.0
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
        """Read a body. Raises `HttpError`: 400 if it is refused, 429 if too many wait, 500 if two processes failed."""
        values = await _count_values(body)
        if values > MAX_VALUES:
            raise too_many_values()
        lane = self._values if values > TEXT_VALUES else self._texts
        return await lane.read(route, body)

    async def unpack(self, coding: str, body: bytes, *, limit: int) -> bytes:
        """Unpack a body, here if that takes less than a millisecond. Raises `HttpError` as `unpack` and `read`.

        `limit` bounds the unpacked body, in bytes.
        """
        plain = unpack_quick(coding, body, limit=limit)
        return await self._texts.unpack(coding, body, limit) if plain is None else plain

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
        self._helper = HelperProcess(
            "gorgo.live.parsing.worker", niceness=NICENESS, timeout_s=JOB_TIMEOUT_S, first=fingerprinter
        )
        self._waiting = 0

    async def read(self, route: str, body: bytes) -> BodyFields:
        with self._turn():
            answer: BodyFields | Refused = await self._helper.answer(route.encode(), body)
        if isinstance(answer, tuple):
            raise HttpError(*answer)
        return answer

    async def unpack(self, coding: str, body: bytes, limit: int) -> bytes:
        joined = BytesIO()  # to join the pieces at the end would hold the event loop
        refused: Refused | None = None
        with self._turn():
            async for piece in self._helper.answers(f"{coding} {limit}".encode(), body):
                if isinstance(piece, tuple):
                    refused = piece  # the last answer; a job that is left before its end costs the process
                else:
                    joined.write(piece)
        if refused is not None:
            raise HttpError(*refused)
        return joined.getvalue()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Count a body of this lane. Raises `HttpError`: 429 if too many wait, 500 if two processes failed."""
        if self._waiting >= MAX_WAITING:
            message = f"{MAX_WAITING} large bodies are being read, the limit of this proxy"
            raise HttpError(429, "too_many_in_flight", message, headers=_RETRY_SOON)
        self._waiting += 1
        try:
            yield
        except HelperFailed:
            raise HttpError(500, "internal_error", "the body could not be read") from None
        finally:
            self._waiting -= 1

    async def aclose(self) -> None:
        await self._helper.aclose()
