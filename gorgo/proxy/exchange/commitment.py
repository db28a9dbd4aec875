"""The claim of the response by one attempt, which its relay makes before anything is sent to the client.

From then on no other attempt is made, so the request's body is dropped: a stream may take minutes.
"""

from __future__ import annotations

from gorgo.core.messages.actions import Dispatch
from gorgo.core.record import mutable_record
from gorgo.live.http.request_buffer import RequestBuffer
from gorgo.live.request.parse import ParsedRequest
from gorgo.live.request.record import RequestRecord
from gorgo.live.state import LiveState
from gorgo.proxy.exchange.race import Race


@mutable_record
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

    state: LiveState
    race: Race
    record: RequestRecord
    request: ParsedRequest
    buffer: RequestBuffer
    dispatch: Dispatch

    def commit(self) -> None:
        """Claim the response, and stop any other attempt."""
        self.race.claim(self.dispatch.attempt_id)
        self.record.replica = self.dispatch.replica
        if self.request.body:
            self.request.body = b""
            self.buffer.release_body()

    def first_content(self) -> None:
        """Record the first token. The relay has claimed the response for it."""
        now = self.state.routing.clock()
        self.state.routing.gateway.first_token(self.dispatch.attempt_id, now=now)
        self.record.first_content(self.dispatch, now=now)
