"""What the proxy itself says to one client: an error, the reason for the end of a stream, its headers of a response.

Owns whether the client is connected. The bytes of a replica's response are `relay`'s.
"""

from __future__ import annotations

import asyncio
from functools import lru_cache

from gorgo.core.messages.actions import Dispatch
from gorgo.live.http.errors import HttpError, Send, error_event, send_error
from gorgo.live.http.headers import Header
from gorgo.live.request.record import RequestRecord
from gorgo.live.request.refusals import RETRY_SOON, record_refusal, refusal_headers
from gorgo.live.state import LiveState
from gorgo.proxy.http.response_writer import ResponseWriter, TryWrite, no_direct_write

#: Headers made once: of a large fleet under a new version of the weights each minute, those of the last ones.
MAX_FIXED = 1024
#: For an error event to a client that may have stopped reading.
_ERROR_EVENT_TIMEOUT_S = 5.0


class ClientResponse:
    """The client's end of one exchange.

    Parameters
    ----------
    state:
        The running proxy.
    send:
        The ASGI callable of the request.
    request_id:
        As the client knows it.
    record:
        Of the request: status and error code.
    route:
        Its path, which decides the form of errors.
    direct:
        Writes chunks of a stream without waiting.
    """

    __slots__ = ("_record", "_route", "_send", "_state", "disconnected", "request_id", "writer")

    def __init__(
        self,
        state: LiveState,
        send: Send,
        request_id: str,
        record: RequestRecord,
        route: str = "",
        direct: TryWrite = no_direct_write,
    ) -> None:
        self._state = state
        self._send = send
        self._record = record
        self._route = route
        self.request_id = request_id
        self.writer = ResponseWriter(send, direct)
        #: The client has disconnected, or does not read.
        self.disconnected = False

    async def send_error(self, error: HttpError) -> None:
        """Send an error of the proxy's own."""
        assert not self.writer.started, "a response has begun"
        # A client that disconnects from here on has had its response.
        self.writer.finished = True
        record_refusal(self._state.telemetry, self._record, error)
        own = refusal_headers(self._state.routing, self.request_id)
        await send_error(self._send, error, own, path=self._route)

    async def abort(self) -> None:
        """End the response because the proxy stops; nothing for a client that has disconnected."""
        if self.disconnected or self.writer.finished:
            return
        if self.writer.started:
            await self.end_stream(503, "stopping", "the proxy is stopping")
        else:
            await self.send_error(HttpError(503, "stopping", "the proxy is stopping", headers=RETRY_SOON))

    async def end_stream(self, status: int, code: str, message: str) -> None:
        """Send the error as an event of the stream. A response without events is cut, which the client sees."""
        self._record.status, self._record.code = status, code
        if not self.writer.carries_events:
            return
        try:
            async with asyncio.timeout(_ERROR_EVENT_TIMEOUT_S):
                event = error_event(status, code, message, named=self.writer.names_events, path=self._route)
                await self.writer.finish(event)
        except TimeoutError:
            self.disconnected = True


def own_headers(request_id: str, dispatch: Dispatch, *, estimates: bool) -> list[Header]:
    """Return the proxy's headers. `estimates` tell a client which prompts others have sent."""
    decision = dispatch.decision
    fixed = _fixed_headers(dispatch.replica, dispatch.region, decision.policy, decision.weights_version)
    headers = [(b"x-request-id", request_id.encode()), *fixed]
    if not estimates:
        return headers
    headers.append((b"x-gorgo-estimated-cached-tokens", b"%d" % decision.estimated_cached_tokens))
    if decision.predicted_ttft_s is not None:
        headers.append((b"x-gorgo-predicted-ttft-ms", b"%.1f" % (decision.predicted_ttft_s * 1e3)))
    return headers


@lru_cache(MAX_FIXED)
def _fixed_headers(replica: str, region: str, policy: str, weights_version: int) -> tuple[Header, ...]:
    """Return the headers that are the same for all responses of a replica under one policy and its weights."""
    return (
        (b"x-gorgo-replica", replica.encode()),
        (b"x-gorgo-region", region.encode()),
        (b"x-gorgo-policy", policy.encode()),
        (b"x-gorgo-weights-version", b"%d" % weights_version),
    )
