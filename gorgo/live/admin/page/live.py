"""The updates of the page as server-sent events: changed parts, once a second.

Theory of operation. Nothing runs without a listener. Each listener has a loop that reads the parts, sends those that
differ from its last ones, and waits. The parts are rendered once per interval for all listeners. A new or returning
browser starts with all parts, so there is no replay and no queue. One that does not read is cut at the write deadline
and delays no other. Each round ends with a `tick`, which is also the heartbeat.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from time import monotonic

from gorgo.live.admin.page.markup import Html
from gorgo.live.http.errors import HttpError, Message, Receive, Send, send_error

#: Interval of updates.
INTERVAL_S = 1.0
#: Write deadline, s; a browser that does not read for longer is asleep.
WRITE_TIMEOUT_S = 10.0
#: Open pages at most; each costs a copy of changed parts.
LISTENERS = 8
#: Delay after which a browser reconnects, ms.
_RETRY_MS = 2000

#: A clock time, and the parts of that time.
TakeSnapshot = tuple[str, Mapping[str, Html]]


class LiveUpdates:
    """The updates of one proxy.

    Parameters
    ----------
    take_snapshot:
        Renders the parts.
    closing:
        Ends every stream.
    interval_s, patience_s, listeners:
        The bounds above.
    clock:
        Seconds, from anywhere.
    """

    def __init__(
        self,
        take_snapshot: Callable[[], Awaitable[TakeSnapshot]],
        closing: asyncio.Event,
        *,
        interval_s: float = INTERVAL_S,
        patience_s: float = WRITE_TIMEOUT_S,
        listeners: int = LISTENERS,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._take_snapshot = take_snapshot
        #: One snapshot at a time, shared by all listeners.
        self._turn = asyncio.Lock()
        self._closing = closing
        self._most = listeners
        self._clock = clock
        self._made: tuple[float, TakeSnapshot] | None = None
        self.interval_s = interval_s
        self.write_timeout_s = patience_s
        #: Streams that are open.
        self.listeners = 0

    async def now(self) -> TakeSnapshot:
        """Return the parts, at most an interval old."""
        async with self._turn:
            if self._made is None or self._clock() - self._made[0] >= 0.9 * self.interval_s:
                self._made = self._clock(), await self._take_snapshot()
            return self._made[1]

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one listener until its end."""
        if self.listeners >= self._most:
            retry = ((b"retry-after", b"10"),)
            error = HttpError(503, "too_many_listeners", f"{self._most} pages are open", headers=retry)
            await send_error(send, error)
            return
        self.listeners += 1
        disconnected = asyncio.create_task(_until_disconnected(receive))
        closing = asyncio.create_task(self._closing.wait())
        try:
            await self._stream(scope, send, disconnected, closing)
        finally:
            self.listeners -= 1
            disconnected.cancel()
            closing.cancel()

    async def _stream(
        self, scope: Message, send: Send, disconnected: asyncio.Task[None], closing: asyncio.Task[bool]
    ) -> None:
        sent: dict[str, Html] = {}
        try:
            await self._start(send)
            while not disconnected.done() and not closing.done():
                await self._write(send, self._news(sent, await self.now()))
                await asyncio.wait(
                    (disconnected, closing), timeout=self.interval_s, return_when=asyncio.FIRST_COMPLETED
                )
            if not disconnected.done():
                async with asyncio.timeout(self.write_timeout_s):
                    await send({"type": "http.response.body", "body": b"event: end\ndata: \n\n", "more_body": False})
        except TimeoutError:
            _cut(scope)

    def _news(self, sent: dict[str, Html], snapshot: TakeSnapshot) -> bytes:
        """Return the events of parts that differ from `sent`, and update it."""
        at, parts = snapshot
        events = []
        for name, html in parts.items():
            if sent.get(name) != html:
                sent[name] = html
                events.append(f"event: part\ndata: {json.dumps({'name': name, 'html': html})}\n\n")
        events.append(f"event: tick\ndata: {at}\n\n")
        return "".join(events).encode()

    async def _start(self, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-store"),
            # Without it nginx buffers events.
            (b"x-accel-buffering", b"no"),
            (b"x-content-type-options", b"nosniff"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._write(send, b"retry: %d\n\n" % _RETRY_MS)

    async def _write(self, send: Send, body: bytes) -> None:
        async with asyncio.timeout(self.write_timeout_s):
            await send({"type": "http.response.body", "body": body, "more_body": True})


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _cut(scope: Message) -> None:
    """Reset the connection: an orderly end would wait for the same client to read."""
    abort = scope.get("state", {}).get("abort")
    if abort is not None:
        abort()
