"""The claim of the response by one attempt, which its relay makes before anything is sent to the client.

From then on no other attempt is made, so the request's body is dropped: a stream may take minutes.
"""

from __future__ import annotations

from gorgo.core.messages.actions import Dispatch
from gorgo.live.http.request_buffer import RequestBuffer
from gorgo.live.request.parse import ParsedRequest
from gorgo.live.request.record import RequestRecord
from gorgo.proxy.exchange.race import Race
from gorgo.proxy.state import RunningProxy


class Commitment:
    """The claim of one attempt.

    Parameters
    ----------
    state:
        The running proxy.
    race, record, request, buffer:
        Of the request.
    dispatch:
        Of the attempt.
    """

    __slots__ = ("_buffer", "_dispatch", "_race", "_record", "_request", "_state")

    def __init__(
        self,
        state: RunningProxy,
        race: Race,
        record: RequestRecord,
        request: ParsedRequest,
        buffer: RequestBuffer,
        dispatch: Dispatch,
    ) -> None:
        self._state = state
        self._race = race
        self._record = record
        self._request = request
        self._buffer = buffer
        self._dispatch = dispatch

    def commit(self) -> None:
        """Claim the response, and stop any other attempt."""
        self._race.claim(self._dispatch.attempt_id)
        self._record.replica = self._dispatch.replica
        if self._request.body:
            self._request.body = b""
            self._buffer.release_body()

    def first_content(self) -> None:
        """Record the first token. The relay has claimed the response for it."""
        now = self._state.clock()
        self._state.gateway.first_token(self._dispatch.attempt_id, now=now)
        self._record.first_content(self._state, self._dispatch, now=now)
