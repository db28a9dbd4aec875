"""What the client of one request is told, beside a replica's own answer: a refusal, the reason of an end, or nothing.

Owns whether the client is still there and what it was last told. The answer's bytes are `relay`'s, their way `sink`'s.
"""

from __future__ import annotations

import asyncio

from gorgo.proxy.exchange.accounting import RequestRecord
from gorgo.proxy.http.errors import HttpError, Send, error_event, send_error
from gorgo.proxy.http.response_writer import ResponseWriter
from gorgo.proxy.state import RunningProxy

#: For the last words to a client that may have stopped reading.
_ERROR_EVENT_TIMEOUT_S = 5.0


class ClientResponse:
    """The client's end of one exchange.

    Parameters
    ----------
    state:
        The proxy's.
    send:
        The server's way to the client.
    request_id:
        As the client knows it.
    account:
        Keeps what was told.
    """

    __slots__ = ("_account", "_send", "_state", "disconnected", "request_id", "sink")

    def __init__(self, state: RunningProxy, send: Send, request_id: str, account: RequestRecord) -> None:
        self._state = state
        self._send = send
        self._account = account
        self.request_id = request_id
        self.sink = ResponseWriter(send)
        #: The client has left, or is given up.
        self.disconnected = False

    async def send_error(self, refusal: HttpError) -> None:
        """An error of the proxy's own, instead of any answer."""
        assert not self.sink.started, "an answer has begun"
        # From here on a client that leaves has had its answer.
        self.sink.finished = True
        self._account.status, self._account.code = refusal.status, refusal.code
        self._state.metrics.rejected(refusal.code)
        policy = self._state.router.policy.name.encode()
        own = ((b"x-request-id", self.request_id.encode()), (b"x-gorgo-policy", policy))
        await send_error(self._send, refusal, own)

    async def abort(self) -> None:
        """The client left, or the grace of a stopping proxy is over."""
        if self.disconnected or self.sink.finished:
            return
        if self.sink.started:
            await self.end_stream(503, "stopping", "the proxy is stopping")
        else:
            await self.send_error(
                HttpError(503, "stopping", "the proxy is stopping", headers=((b"retry-after", b"1"),))
            )

    async def end_stream(self, status: int, code: str, message: str) -> None:
        """Tell the error in the stream, where it can be told; any other answer is cut, and the client sees that."""
        self._account.status, self._account.code = status, code
        if not self.sink.carries_events:
            return
        try:
            async with asyncio.timeout(_ERROR_EVENT_TIMEOUT_S):
                await self.sink.finish(error_event(status, code, message, named=self.sink.names_events))
        except TimeoutError:
            self.disconnected = True
