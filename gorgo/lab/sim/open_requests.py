"""The open requests of a run: the Router's request for each, and its record.

Owns the updates of a record: at arrival, dispatch, first token, continuation, rejection and end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gorgo.core.messages.actions import Dispatch, Reject
from gorgo.core.messages.request import Outcome, RouteRequest
from gorgo.lab.sim.records import SimRecord
from gorgo.lab.sim.remote_replica import RemoteReplica
from gorgo.lab.sim.topology import ClientTrip
from gorgo.lab.sim.workload import SimRequest


class OpenRequests:
    """Open requests by id; times are those of the run, s.

    Parameters
    ----------
    block_tokens, slo_ttft_s:
        As in `Simulation`.
    kv_hashes:
        Returns the own hashes of a prompt's blocks for the Router.
    """

    def __init__(
        self,
        *,
        block_tokens: float,
        slo_ttft_s: float | None,
        kv_hashes: Callable[[bytes], Mapping[int, Sequence[int]]] = lambda _: {},
    ) -> None:
        self._block_tokens = block_tokens
        self._kv_hashes = kv_hashes
        self._slo_ttft_s = slo_ttft_s
        #: Of every request that has come, in order.
        self.records: list[SimRecord] = []
        #: Indices of requests that have ended, and when for their clients; whoever sends what follows empties it.
        self.ended: list[tuple[int, float]] = []
        #: The ways of clients that are not beside their router, by request.
        self._client_trips: dict[str, ClientTrip] = {}
        self._open: dict[str, tuple[SimRequest, SimRecord]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def received(self, request: SimRequest, *, now: float, trip: ClientTrip | None = None) -> RouteRequest:
        """Record an arrival, of a client that is elsewhere by its trip; return the request for the Router."""
        request_id = str(request.index)
        assert request_id not in self._open, "an index names one request"
        sent_s = now
        if trip is not None:
            self._client_trips[request_id], sent_s = trip, trip.sent_s
        record = SimRecord(id=request_id, scheduled_s=sent_s, sent_s=sent_s, input_tokens=request.prompt_tokens)
        self.records.append(record)
        self._open[request_id] = request, record
        return RouteRequest(
            request_id,
            now,
            prompt_tokens=request.prompt_tokens,
            blocks=request.blocks,
            block_tokens=self._block_tokens,
            prefix_hash=request.prefix_hash,
            session_id=request.session_id,
            body_bytes=request.body_bytes,
            slo_ttft_s=self._slo_ttft_s,
            kv_hashes=self._kv_hashes(request.blocks),
            boundaries=request.boundaries,
        )

    def dispatched(self, dispatch: Dispatch, *, now: float) -> SimRequest:
        """Record a dispatch, which may be a retry; return the request for the engine."""
        request, record = self._open[dispatch.request_id]
        decision = dispatch.decision
        record.replica, record.region = dispatch.replica, dispatch.region
        if not record.attempts:
            trip = self._client_trips.get(dispatch.request_id)
            record.queued_s = now - record.scheduled_s if trip is None else now - trip.received_s
        record.attempts = dispatch.attempt
        record.weights_version = decision.weights_version
        record.estimated_cached_tokens = decision.estimated_cached_tokens
        record.shadow = decision.shadow
        predicted_s = decision.predicted_ttft_s
        record.predicted_ttft_ms = None if predicted_s is None else predicted_s * 1e3
        return request

    def rest_of(self, request_id: str, tokens: int) -> SimRequest:
        """Return the request that goes on with its answer behind so many tokens."""
        request, record = self._open[request_id]
        more = tokens - (request.prompt_tokens - record.input_tokens)
        return request.rest(more, block_tokens=int(self._block_tokens))

    def opened_beside(self, dispatch: Dispatch) -> None:
        """Another replica is asked for the rest of its answer, while its stream is open."""
        self._open[dispatch.request_id][1].attempts = dispatch.attempt

    def hedged(self, request_id: str) -> None:
        """It goes to a second replica while the first has not answered."""
        self._open[request_id][1].hedged = True

    def first_token(self, request_id: str, site: RemoteReplica, *, now: float) -> None:
        """`site` answers it."""
        record = self._open[request_id][1]
        if not record.continued:
            trip = self._client_trips.get(request_id)
            if trip is not None:
                back_s = trip.back_s()
                record.client_network_ms = (trip.out_s + back_s) * 1e3
                now += back_s
            record.ttft_ms = (now - record.scheduled_s) * 1e3
        record.replica, record.region = site.name, site.replica.region

    def continued(self, request_id: str, tokens: int) -> None:
        """Its answer broke off behind so many tokens, and goes on at another replica."""
        record = self._open[request_id][1]
        self._open[request_id] = self.rest_of(request_id, tokens), record
        record.continued += 1

    def rejected(self, reject: Reject, *, now: float) -> None:
        """The Router has turned it away."""
        record = self._close(reject.request_id, now)
        record.status, record.error = reject.status, reject.code

    def on_result(self, request_id: str, outcome: Outcome, *, now: float) -> None:
        """It has ended with its attempt."""
        before = self._open[request_id][0].prompt_tokens
        record = self._close(request_id, now)
        record.status, record.error = outcome.status, outcome.error
        record.cached_tokens, record.output_tokens = outcome.cached_tokens, outcome.output_tokens
        if record.continued and outcome.output_tokens is not None:
            # Counts of the rest, whose prompt ends with the tokens before it.
            record.cached_tokens = min(outcome.cached_tokens or 0, record.input_tokens)
            record.output_tokens = outcome.output_tokens + before - record.input_tokens

    def broken(self, request_id: str, error: str, *, now: float) -> None:
        """Its router has died."""
        self._close(request_id, now).error = error

    def _close(self, request_id: str, now: float) -> SimRecord:
        request, record = self._open.pop(request_id)
        trip = self._client_trips.pop(request_id, None)
        if trip is not None:  # the end comes no sooner than what was sent before it
            now = max(now + trip.back_s(), record.scheduled_s + (record.ttft_ms or 0.0) / 1e3)
        self.ended.append((request.index, now))
        record.e2e_s = now - record.scheduled_s
        return record
