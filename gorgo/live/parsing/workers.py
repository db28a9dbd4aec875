"""Processes that read and unpack large bodies, one per lane: a body of many numbers delays no long text.

Owns the lanes, and which body goes to which of them. Leaves the processes to `helper_process`: a body whose process
ends is read again by the next one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import BytesIO

from gorgo.core.numeric import count_values
from gorgo.core.prompt.fingerprint import Fingerprinter
from gorgo.live.helper_process import HelperFailed, HelperProcess
from gorgo.live.http.errors import HttpError
from gorgo.live.parsing.json_body import MAX_VALUES, BodyFields, too_many_values, unpack_quick
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

    async def read(self, route: str, body: bytes, *, client: str = "") -> BodyFields:
        """Read a body. Raises `HttpError`: 400 if it is refused, 429 if too many wait, 500 if two processes failed.

        Bodies of different clients take turns, however many each has sent.
        """
        values = await _count_values(body)
        if values > MAX_VALUES:
            raise too_many_values()
        lane = self._values if values > TEXT_VALUES else self._texts
        return await lane.read(route, body, client)

    async def unpack(self, coding: str, body: bytes, *, limit: int, client: str = "") -> bytes:
        """Unpack a body, here if that takes less than a millisecond. Raises `HttpError` as `unpack` and `read`.

        `limit` bounds the unpacked body, in bytes.
        """
        plain = unpack_quick(coding, body, limit=limit)
        return await self._texts.unpack(coding, body, limit, client) if plain is None else plain

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


class Turns:
    """Whose body is next: clients in turn, and within one client the first that came.

    At most `most` bodies wait, the one in progress included. Then a further one takes the place of the last of the
    client that has most, if that has at least two more than its own client; else it is refused.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def wait(self, client: str) -> None:
        """Return when it is the turn of a body of `client`; `release` ends it. Raises `HttpError` (429)."""
        if not self._count:
            self._count = 1
            return
        if self._count >= self._most:
            self._evict_last(client)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        self._count += 1
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._leave(client, turn)
            elif turn.exception() is None:
                self.release()  # it was its turn
            raise

    def release(self) -> None:
        """End the turn; the first body of the client that has waited longest for one is next."""
        self._count -= 1
        while self._waiting:
            client = next(iter(self._waiting))
            turn = self._waiting[client][0]
            bodies = self._waiting[client]
            self._leave(client, turn)
            if turn.done():  # cancelled, and its task has not run since
                continue
            self._count += 1
            if bodies:
                self._waiting[client] = self._waiting.pop(client)
            turn.set_result(None)
            return

    def _evict_last(self, client: str) -> None:
        most = max(self._waiting, key=lambda one: len(self._waiting[one]), default=client)
        if len(self._waiting.get(most, ())) < len(self._waiting.get(client, ())) + 2:
            raise self._refusal()
        last = self._waiting[most][-1]
        self._leave(most, last)
        if not last.done():
            last.set_exception(self._refusal())

    def _leave(self, client: str, turn: asyncio.Future[None]) -> None:
        """Take a body out of those that wait, if it is among them."""
        bodies = self._waiting.get(client, ())
        if turn in bodies:
            self._waiting[client].remove(turn)
            self._count -= 1
            if not self._waiting[client]:
                del self._waiting[client]

    def _refusal(self) -> HttpError:
        message = f"{self._most} large bodies are being read, the limit of this proxy"
        return HttpError(429, "too_many_in_flight", message, headers=_RETRY_SOON)


class _Lane:
    """One process, and its jobs one after the other."""

    def __init__(self, fingerprinter: Fingerprinter) -> None:
        self._helper = HelperProcess(
            "gorgo.live.parsing.worker", niceness=NICENESS, timeout_s=JOB_TIMEOUT_S, first=fingerprinter
        )
        self._turns = Turns(MAX_WAITING)

    async def read(self, route: str, body: bytes, client: str) -> BodyFields:
        async with self._turn(client):
            answer: BodyFields | Refused = await self._helper.answer(route.encode(), body)
        if isinstance(answer, tuple):
            raise HttpError(*answer)
        return answer

    async def unpack(self, coding: str, body: bytes, limit: int, client: str) -> bytes:
        joined = BytesIO()  # to join the pieces at the end would hold the event loop
        refused: Refused | None = None
        async with self._turn(client):
            async for piece in self._helper.answers(f"{coding} {limit}".encode(), body):
                if isinstance(piece, tuple):
                    refused = piece  # the last answer; a job that is left before its end costs the process
                else:
                    joined.write(piece)
        if refused is not None:
            raise HttpError(*refused)
        return joined.getvalue()

    @asynccontextmanager
    async def _turn(self, client: str) -> AsyncIterator[None]:
        """Wait for a turn. Raises `HttpError`: 429 if too many wait, 500 if two processes failed."""
        await self._turns.wait(client)
        try:
            yield
        except HelperFailed:
            raise HttpError(500, "internal_error", "the body could not be read") from None
        finally:
            self._turns.release()

    async def aclose(self) -> None:
        await self._helper.aclose()
