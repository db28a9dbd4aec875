"""Processes that read large bodies, one per lane: a body of many numbers delays no long text.

Owns the lanes, and which body goes to which of them. Leaves the processes to `helper_process`: a body whose process
ends is read again by the next one.
"""

from __future__ import annotations

import asyncio

from gorgo.core.numeric import count_values
from gorgo.core.prompt.fingerprint import Fingerprinter
from gorgo.live.helper_process import HelperFailed, HelperProcess
from gorgo.live.http.errors import HttpError
from gorgo.live.parsing.json_body import MAX_VALUES, BodyFields, too_many_values
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
        if self._waiting >= MAX_WAITING:
            message = f"{MAX_WAITING} large bodies are being read, the limit of this proxy"
            raise HttpError(429, "too_many_in_flight", message, headers=_RETRY_SOON)
        self._waiting += 1
        try:
            result: BodyFields | Refused = await self._helper.answer(route.encode(), body)
        except HelperFailed:
            raise HttpError(500, "internal_error", "the body could not be read") from None
        finally:
            self._waiting -= 1
        if isinstance(result, tuple):
            status, code, message = result
            raise HttpError(status, code, message)
        return result

    async def aclose(self) -> None:
        await self._helper.aclose()
