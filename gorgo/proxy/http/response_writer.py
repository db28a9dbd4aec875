"""The client's side of one exchange: a status, headers, chunks, an end. Over ASGI; `shortcut` knows the server."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence

from gorgo.proxy.http.direct_write import TryWrite, direct_write, no_direct_write
from gorgo.proxy.http.errors import Send
from gorgo.proxy.http.headers import Header, find, is_encoded, is_event_stream


class ResponseWriter:
    """What has been sent to the client so far, and what may still be sent.

    `sending` is true while a chunk waits for the client to read: a timeout then is the client's fault.
    `carries_events` says that an error can still be told in the stream itself, `names_events` that events have names
    there.
    `push(chunk)` sends a chunk without waiting; False means that it did not, and that `write` has to.
    """

    __slots__ = ("_send", "carries_events", "finished", "names_events", "sending", "started", "status", "try_write")

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False
        self.finished = False
        self.sending = False
        self.carries_events = False
        self.names_events = False
        self.status = 0
        self.try_write: TryWrite = no_direct_write

    async def start(self, status: int, headers: Sequence[Header], *, names_events: bool = False) -> None:
        """From here on neither failover nor another status is possible."""
        self.started = True
        self.names_events = names_events
        self.status = status
        self.carries_events = (
            is_event_stream(headers) and not is_encoded(headers) and not find(headers, b"content-length")
        )
        self.sending = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        self.sending = False
        # Streams of events only: other bodies have few chunks, and a length or an encoding of their own.
        if self.carries_events and status == 200:
            self.try_write = direct_write(self._send)

    def write(self, chunk: bytes) -> Awaitable[None]:
        """Not a coroutine of its own, for the sake of the hot loop, which also keeps `sending`."""
        return self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def finish(self, chunk: bytes = b"") -> None:
        """The last chunk. An exchange that ends without it is cut, and the client sees that it is."""
        self.finished = True
        self.try_write = no_direct_write
        self.sending = True
        await self._send({"type": "http.response.body", "body": chunk, "more_body": False})
        self.sending = False
