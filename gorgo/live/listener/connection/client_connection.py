"""One connection of a client: reads requests, runs the application, ends in time.

Owns the turns of requests, deadlines, refusals, and what the connections of one listener share. Leaves the bytes of
requests to `reader`, those of responses to `cycle`, writes and ends to `transport`, and the number of connections to
the listener. hypercorn's public `Config` gives timeouts, bounds, own headers and the log.

Theory of operation. The transport calls `data_received`; a complete head starts the application in a task of its own,
and everything else happens in callbacks. Two deadlines are possible: the end of a head, counted from its first byte (of
the first head, from the connection's start), and the end of an idle connection.

A client that ends its side is disconnected for the application: most have gone, and a replica must not go on for them.
The transport stays open for what the application still writes.

An incomplete response shows by its chunks or its length. A client of HTTP/1.0 may have neither and takes an orderly end
for the end of the response, so its connection is reset.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from math import inf
from time import time
from typing import Any

from hypercorn.config import Config

from gorgo.live.http.errors import error_json
from gorgo.live.listener.connection.cycle import BODY_BYTES, ClientTransport, RequestCycle
from gorgo.live.listener.connection.reader import Head, Refused, RequestReader
from gorgo.live.listener.heads import HeadLimits, PartialHeads

#: Time and bytes for a client that is still sending to read its response: a reset would take it from its buffer.
_SENDING_S, _SENDING_BYTES = 1.0, 8 * 1024 * 1024
#: Refusals of what a client sent: phrase, code and message, by status.
_ERRORS = {
    400: ("Bad Request", "invalid_http", "expected HTTP/1.1, and an unambiguous request"),
    408: ("Request Timeout", "request_timeout", "expected the whole head of the request in time"),
    431: ("Request Header Fields Too Large", "headers_too_large", "the request's head is too large"),
    500: ("Internal Server Error", "internal_error", "internal error of the proxy"),
    501: ("Not Implemented", "transfer_encoding", "expected chunked as the only transfer coding"),
    503: ("Service Unavailable", "buffers_full", "too many heads are incomplete; expected the whole head at once"),
    505: (
        "HTTP Version Not Supported",
        "http_version",
        "expected HTTP/1.1; for HTTP/2, put a load balancer or Envoy in front",
    ),
}


class ServerSettings:
    """What the connections of one listener share.

    Parameters
    ----------
    app:
        The ASGI application.
    config:
        Its timeouts, bounds, root path, log, and the headers that it adds to each response.
    heads:
        Bytes of incomplete heads, of all connections in sum.
    """

    def __init__(self, app: Any, config: Config, heads: PartialHeads) -> None:
        self.app = app
        self.heads = heads
        self.keep_alive_s = float(config.keep_alive_timeout)
        self.requests_per_connection: int = config.keep_alive_max_requests
        #: Whether each connection ends with its next response: others accept new ones from the listener.
        self.retiring = False
        self.root_path: str = config.root_path
        self.log = config.log
        self._config = config
        self._own_headers = b""
        self._made_s = -1

    def own_headers(self) -> bytes:
        """Return the lines of `date`, `server` and `alt-svc` as configured, made once per second."""
        now_s = int(time())
        if now_s != self._made_s:
            pairs = self._config.response_headers("h11")
            self._own_headers = b"".join(b"%b: %b\r\n" % pair for pair in pairs)
            self._made_s = now_s
        return self._own_headers


class ClientConnection(asyncio.Protocol):
    """One connection.

    Parameters
    ----------
    settings:
        Shared by the connections of a listener.
    limits:
        Bounds of heads.
    on_idle:
        Called with whether the connection waits for a request, at each change.
    on_end:
        Called once: the transport is closed and the application has returned.
    """

    def __init__(
        self,
        settings: ServerSettings,
        limits: HeadLimits,
        *,
        on_idle: Callable[[ClientConnection, bool], None],
        on_end: Callable[[ClientConnection], None],
    ) -> None:
        self._settings = settings
        self.transport = ClientTransport()
        self.limits = limits
        self._on_idle, self._on_end = on_idle, on_end
        self._reader = RequestReader(limits)
        #: The request in progress, until its response is complete.
        self._cycle: RequestCycle | None = None
        self._requests = 0
        #: Calls of the application; the last one may still return while the next runs.
        self._calls: dict[RequestCycle, asyncio.Task[None]] = {}
        self._addresses: tuple[object, object] = (None, None)
        self._scheme = "http"
        self._deadline = Deadline(self.transport.loop, self._on_deadline)
        #: A head has begun and is incomplete.
        self._has_begun = False
        #: Bytes counted as those of an incomplete head, or behind a request.
        self._counted_bytes = 0
        self._dropped_bytes = 0
        self._stopping = self._at_eof = False
        #: Another request may have been in the bytes that were dropped: the one in progress is the last.
        self._is_last = False
        #: Set with the call of `on_end`.
        self.ended: asyncio.Future[None] = self.transport.loop.create_future()

    # -- the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport.connection_made(transport)
        if transport.get_extra_info("ssl_object") is not None:
            self._scheme = "https"
        self._addresses = _address(transport, "peername"), _address(transport, "sockname")
        self._has_begun = True
        self._deadline.set(self.limits.timeout_s)
        if self._stopping:
            self.close()

    def data_received(self, data: bytes) -> None:
        if self.transport.has_ended_writing:
            self._dropped_bytes += len(data)
            if self._dropped_bytes > _SENDING_BYTES:
                self.close()
            return
        self._reader.receive(data)
        self._read()

    def eof_received(self) -> bool:
        self._at_eof = True
        if self._cycle is None:
            self.close()
            return False
        self._cycle.disconnect()
        return self._scheme == "http"

    def pause_writing(self) -> None:
        self.transport.pause_writing()

    def resume_writing(self) -> None:
        self.transport.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self.transport.connection_lost()
        self._end_reading()
        self._end_if_done()

    # -- requests

    def _read(self) -> None:
        """Read what was received, as far as its turn has come."""
        cycle = self._cycle
        try:
            if cycle is None:
                head = self._reader.next_head()
                if head is not None:
                    self._run(head)
                elif self._reader.buffered_bytes and not self._has_begun:
                    self._has_begun = True
                    self._deadline.set(self.limits.timeout_s)
            elif not self._reader.complete:
                part = self._reader.read_body()
                cycle.feed(part, complete=self._reader.complete)
        except Refused as refused:
            self.refuse(refused.status)
        else:
            if self._counted_bytes or self._reader.buffered_bytes:
                self._count_head()
            self._update_reading()

    def _run(self, head: Head) -> None:
        """Start the application for one request."""
        self._has_begun = False
        self._deadline.unset()
        self._requests += 1
        self._cycle = cycle = RequestCycle(self, self.transport, head)
        cycle.feed(self._reader.read_body(), complete=self._reader.complete)
        self._on_idle(self, False)
        scope = cycle.scope(self._addresses, self._scheme, self._settings.root_path, {"abort": self.abort_transport})
        self._calls[cycle] = self.transport.loop.create_task(self._call(cycle, scope))

    async def _call(self, cycle: RequestCycle, scope: Any) -> None:
        failure: Exception | None = None
        try:
            await self._settings.app(scope, cycle.receive, cycle.send_message)
        except Exception as error:  # noqa: BLE001 - the border of one request
            failure = error
        finally:
            cycle.returned()
            self._end_call(cycle)
            self._forget_call(cycle)
        if failure is not None:
            await self._settings.log.exception("the application failed", exc_info=failure)

    def _end_call(self, cycle: RequestCycle) -> None:
        """End the connection if its application returned without a complete response."""
        if cycle.ended or self.transport.is_closing:
            return
        if cycle.ends_with_connection:
            self.transport.reset()
            self._end_reading()
        elif cycle.started or cycle.disconnected:
            self.close()
        else:
            self.refuse(500)

    def response_ended(self) -> None:
        """Go on with the next request, or end the connection. Called by the request in progress."""
        cycle, self._cycle = self._cycle, None
        assert cycle is not None
        if not self._reader.complete:
            self._close_while_sent_to()
        elif not cycle.persistent or self._is_last or self._stopping or self._at_eof:
            self.close()
        elif not self.transport.is_closing:
            self._reader.start_next()
            self._deadline.set(self._settings.keep_alive_s)
            self._on_idle(self, True)
            if self._reader.buffered_bytes:
                self._read()
            else:
                self._update_reading()

    def body_taken(self) -> None:
        """Read on: the application took what was received of the body."""
        self._update_reading()

    def own_headers(self) -> bytes:
        return self._settings.own_headers()

    def must_close(self) -> bool:
        """Return whether the response that begins is the last."""
        settings = self._settings
        return (
            self._is_last
            or self._stopping
            or self._at_eof
            or settings.retiring
            or self._requests > settings.requests_per_connection
        )

    # -- bounds

    def _update_reading(self) -> None:
        """Pause reading while the application does not take a body, or the client is far ahead of its responses."""
        cycle = self._cycle
        if cycle is None:
            self.transport.pause_reading(False)
        elif cycle.complete:
            self.transport.pause_reading(self._reader.buffered_bytes > self.limits.size_bytes)
        else:
            self.transport.pause_reading(cycle.body_bytes > BODY_BYTES)

    def _count_head(self) -> None:
        """Count the bytes that wait unread; if all of them are too many, refuse an incomplete head or drop the rest."""
        before, now = self._counted_bytes, self._reader.buffered_bytes
        if now != before:
            self._counted_bytes = now
            fits = self._settings.heads.replace(before, now)
            if fits or now < before:
                return
            if self._cycle is None:
                self.refuse(503)
            elif self._cycle.complete:
                self._drop_rest()

    def _drop_rest(self) -> None:
        """Drop what came behind the request in progress, and end the connection after its response."""
        self._is_last = True
        self._reader.stop()
        self._count_head()

    def _on_deadline(self) -> None:
        if self._has_begun:
            self.refuse(408)
        else:
            self.close()

    # -- the end

    def refuse(self, status: int) -> None:
        """Answer what was received with an error, unless a response has begun, and end the connection."""
        cycle, self._cycle = self._cycle, None
        if cycle is None:
            # A client that has sent nothing waits for nothing.
            silent = status == 408 and not self._reader.buffered_bytes
        else:
            silent = cycle.started
            cycle.refuse()
        if silent:
            self.close()
        elif not self.transport.is_closing:
            self.transport.write(refusal(status, self.own_headers(), head_only=cycle is not None and cycle.is_head))
            self._close_while_sent_to()

    def _close_while_sent_to(self) -> None:
        """Close the connection once the client has had time to read the response, though it may still be sending."""
        if self._stopping or self._at_eof or self.transport.is_closing:
            self.close()
            return
        self.transport.pause_reading(False)
        self.transport.end_writing()
        self._end_reading()
        self._has_begun = False
        self._deadline.set(_SENDING_S)
        self._on_idle(self, True)  # a new connection may take its place

    def stop(self) -> None:
        """End the connection as soon as it has no request in progress."""
        self._stopping = True
        if self._cycle is None:
            self.close()

    def cancel_calls(self) -> None:
        """Cancel the application's calls."""
        for cycle, call in tuple(self._calls.items()):
            call.add_done_callback(partial(self._forget_call, cycle))  # one that has never run
            call.cancel()

    def close(self) -> None:
        """End the connection once what was written is sent."""
        self.transport.close()
        if self.transport.is_closing:
            self._end_reading()

    def abort_transport(self) -> None:
        """End the connection at once."""
        self.transport.abort_transport()
        self._end_reading()

    def _end_reading(self) -> None:
        self._deadline.cancel()
        self._reader.stop()
        self._count_head()
        if self._cycle is not None:
            self._cycle.disconnect()

    def _forget_call(self, cycle: RequestCycle, _: object = None) -> None:
        self._calls.pop(cycle, None)
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self.transport.is_lost and not self._calls and not self.ended.done():
            self.ended.set_result(None)
            self._on_end(self)


class Deadline:
    """One timer for all deadlines of a connection: calls `expired` once the deadline has passed.

    A later deadline is only a number, which the timer reads when it fires: a request sets and clears one without a
    timer of its own.
    """

    __slots__ = ("_expired", "_loop", "_timer", "_when")

    def __init__(self, loop: asyncio.AbstractEventLoop, expired: Callable[[], None]) -> None:
        self._loop = loop
        self._expired = expired
        self._when = inf
        self._timer: asyncio.TimerHandle | None = None

    def set(self, delay_s: float) -> None:
        self._when = self._loop.time() + delay_s
        if self._timer is None or self._timer.when() > self._when:
            self._arm()

    def unset(self) -> None:
        self._when = inf

    def cancel(self) -> None:
        """End the timer too."""
        self._when = inf
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._when, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._loop.time() >= self._when:
            self._when = inf
            self._expired()
        elif self._when < inf:
            self._arm()


def refusal(status: int, own_headers: bytes, *, head_only: bool = False) -> bytes:
    """Return the last response of a connection; no text of it repeats what the client sent."""
    phrase, code, message = _ERRORS[status]
    body = b"" if head_only else error_json(status, code, message)
    head = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\n" % (status, phrase.encode())
    return head + own_headers + b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def _address(transport: asyncio.BaseTransport, name: str) -> tuple[str, int] | None:
    """Return host and port of a side; None if it is unknown."""
    address = transport.get_extra_info(name)
    return (address[0], address[1]) if isinstance(address, tuple) else None
