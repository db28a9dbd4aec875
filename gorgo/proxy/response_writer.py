"""The response of one exchange to its client, over ASGI: status, headers, chunks, end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from gorgo.live.http.errors import Message, Send
from gorgo.live.http.headers import Header, find, is_encoded, is_event_stream

#: Writes a chunk of a body without a length in one call that never waits; False if it was not written, because the
#: client is behind or has disconnected. The chunk is then for `send`, which waits.
TryWrite = Callable[[bytes], bool]


def no_direct_write(chunk: bytes) -> bool:  # noqa: ARG001 - a `TryWrite`
    """Decline every chunk."""
    return False


def direct_write(scope: Message) -> TryWrite:
    """Return the `TryWrite` of a request's connection. CORS wraps `send` alone: it changes heads, never a body."""
    write: TryWrite = scope.get("extensions", {}).get("gorgo.write", no_direct_write)
    return write


class ResponseWriter:
    """Writes one response.

    `sending` is true while a chunk waits for the client to read: a timeout is then the client's. `carries_events`: an
    error can be sent in the stream itself. `names_events`: events have names there. `try_write(chunk)` sends a chunk
    without waiting, by `direct`; False means that `write` has to.
    """

    __slots__ = (
        "_direct",
        "_send",
        "carries_events",
        "finished",
        "names_events",
        "sending",
        "started",
        "status",
        "try_write",
    )

    def __init__(self, send: Send, direct: TryWrite = no_direct_write) -> None:
        self._send = send
        self._direct = direct
        self.started = False
        self.finished = False
        self.sending = False
        self.carries_events = False
        self.names_events = False
        self.status = 0
        self.try_write: TryWrite = no_direct_write

    async def start(
        self,
        status: int,
        headers: Sequence[Header],
        *,
        names_events: bool = False,
        body_follows: bool = False,
        has_events: bool = True,
    ) -> None:
        """Send the head. Neither failover nor another status is possible afterwards.

        `body_follows`: bytes of the body are sent in the same step. `has_events`: the body may be a stream of events.
        """
        self.started = True
        self.names_events = names_events
        self.status = status
        self.carries_events = (
            has_events and is_event_stream(headers) and not is_encoded(headers) and not find(headers, b"content-length")
        )
        self.sending = True
        message: Message = {"type": "http.response.start", "status": status, "headers": headers}
        if body_follows:
            message["gorgo.body_follows"] = True
        await self._send(message)
        self.sending = False
        # Event streams only: other bodies have few chunks, and a length or an encoding.
        if self.carries_events and status == 200:
            self.try_write = self._direct

    def write(self, chunk: bytes) -> Awaitable[None]:
        """Send a chunk. No coroutine of its own, to keep the hot loop fast; the caller sets `sending`."""
        return self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def finish(self, chunk: bytes = b"") -> None:
        """Send the last chunk. Without it the response is cut, which the client sees."""
        self.finished = True
        self.try_write = no_direct_write
        self.sending = True
        await self._send({"type": "http.response.body", "body": chunk, "more_body": False})
        self.sending = False
