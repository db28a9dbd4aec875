"""What a dispatch takes on its way to a replica and in the engine, by the columns of the fleet and the prior."""

from __future__ import annotations

from gorgo.core.fleet.columns import Columns
from gorgo.core.fleet.network import arrival_s, one_way_s
from gorgo.core.fleet.replica import Replica
from gorgo.core.messages.request import RouteRequest
from gorgo.core.record import record


@record
class NetworkEstimate:
    """Of a request to the replica chosen: round trip (NaN if unknown), arrival, half a round trip (0 if unknown), and
    prefill by the prior.
    """

    rtt_s: float
    arrives_s: float
    one_way_s: float
    prior_s: float

    @classmethod
    def of(
        cls, columns: Columns, request: RouteRequest, replica: Replica, cached_tokens: int, *, now: float
    ) -> NetworkEstimate:
        slot = replica.slot
        return cls(
            columns.rtt_s.item(slot),
            arrival_s(columns, slot, request.body_bytes, now=now),
            one_way_s(columns, slot),
            replica.prior.seconds(request.prompt_tokens - cached_tokens, cached_tokens),
        )
