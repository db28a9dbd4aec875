"""What is known of every replica as numpy columns, one cell per slot.

Owns the cells and their empty values, and what the cells of connections say of the arrival of a request (`arrival_s`).
The fleet writes cells event by event; policies read them through `candidates`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from hashlib import blake2b
from math import inf, nan

import numpy as np
from numpy.typing import NDArray

from gorgo.core.latency.decode import PRIOR_TOKENS
from gorgo.core.latency.tcp import (
    INITIAL_WINDOW_BYTES,
    RECEIVE_WINDOW_BYTES,
    Pacing,
    TcpWindows,
    cwnd_after_idle,
    is_one_burst,
    round_trips_of_one,
)
from gorgo.core.messages.request import OpenConnection
from gorgo.core.numeric import Floats

#: Cells of an empty slot. Columns that are not here are NaN: unknown.
_EMPTY: Mapping[str, float] = {
    "in_flight_requests": 0.0,
    "in_flight_tokens": 0.0,
    "queued_prefill_tokens": 0.0,
    "prefill_base_s": 0.0,
    "prefill_token_s": 0.0,
    "prefill_kappa_s": 0.0,
    "slowdown": 1.0,
    "answer_tokens": PRIOR_TOKENS,
    "drained_at_s": -inf,
    "head_due_s": inf,
    "waiting_prefill_s": 0.0,
    "shared_s": 0.0,
    "head_shared_s": 0.0,
    "head_began_s": -inf,
    "prefill_share": 0.0,
    "prefill_share_s": 0.0,
    "connect_round_trips": 1.0,
    "pace_bytes": inf,
    "burst_bytes": inf,
    "salt": 0,
}


def accelerator_code(name: str) -> float:
    """Return the code of an accelerator in its column: 48 bits of a hash, which a float holds exactly."""
    return float(int.from_bytes(blake2b(name.encode(), digest_size=6).digest(), "little"))


@dataclass(slots=True)
class Columns:
    """Columns with one cell per slot. Unknown or stale is NaN; counts by this proxy are never unknown."""

    #: EWMA of the probe round trip, s. NaN before the first probe.
    rtt_s: Floats
    #: Requests dispatched by this proxy and not ended.
    in_flight_requests: Floats
    #: Prompt tokens of those requests (Q_i, docs/policies/gorgo.md).
    in_flight_tokens: Floats
    #: Prompt tokens of those that still wait for their first token.
    queued_prefill_tokens: Floats
    #: Of those tokens the ones that the index has not found there. NaN unless a policy learns, as the next three
    #: (`core.dispatch.in_flight`).
    uncached_prefill_tokens: Floats
    #: Requests between their first token and their end, and the sum of the times of their first tokens.
    decoding_requests: Floats
    first_tokens_s: Floats
    #: Learned time per output token of a request alone, s. NaN before an answer reports its tokens.
    token_gap_s: Floats
    #: Mean output tokens of its answers, a prior before they are known (`core.latency.decode`).
    answer_tokens: Floats
    #: Scraped from the engine: requests running, requests waiting, KV tokens in use. NaN when unknown or stale.
    running_requests: Floats
    queued_requests: Floats
    used_tokens: Floats
    #: When the engine was last scraped. NaN when it was not, or when stale.
    sampled_s: Floats
    #: Size of the KV pool and of the running batch, from the engine or regions.yaml. NaN when unknown.
    kv_capacity_tokens: Floats
    max_running_requests: Floats
    #: Priors of a prefill: constant part, s per token, s per pair of a new token and one that it attends to.
    prefill_base_s: Floats
    prefill_token_s: Floats
    prefill_kappa_s: Floats
    #: Learned factor on the priors.
    slowdown: Floats
    #: The prefill queue, in the engine's time: when it has done what was sent to it, and when the first token of the
    #: first in line is due (infinite when none is expected).
    drained_at_s: Floats
    head_due_s: Floats
    #: Prefill of all requests before their first token, s.
    waiting_prefill_s: Floats
    #: Work of other routers before them as of their dispatches, which `drained_at_s` contains; of it what is before the
    #: first in line, and when the engine began with that (`core.latency.prefill_queue`), s.
    shared_s: Floats
    head_shared_s: Floats
    head_began_s: Floats
    #: Share of its time in prefills, by what routers have sent there, as of the last dispatch, and when that was
    #: (`core.latency.prefill`).
    prefill_share: Floats
    prefill_share_s: Floats
    #: Connection of the next request: TCP windows (`core.latency.tcp`; 0 where none is open, NaN where not reported),
    #: time of the last send, and round trips to open a new connection.
    cwnd_bytes: Floats
    rwnd_bytes: Floats
    sent_s: Floats
    connect_round_trips: Floats
    #: How its sender spreads a flight: so much per round trip (infinite where it does not pace) after a first burst.
    pace_bytes: Floats
    burst_bytes: Floats
    #: Strictest objective per output token among the requests in flight, s. NaN without one.
    slo_tpot_s: Floats
    #: Code of the configured accelerator (`accelerator_code`). NaN when unknown.
    accelerator: Floats
    #: A fixed 64-bit hash of the replica's name, for rendezvous hashing.
    salt: NDArray[np.uint64]

    @classmethod
    def empty(cls) -> Columns:
        """Return columns without a slot."""
        columns = {item.name: np.zeros(0) for item in fields(cls) if item.name != "salt"}
        return cls(**columns, salt=np.zeros(0, dtype=np.uint64))

    def grow(self, count: int = 1) -> None:
        """Add empty slots. Rare: only when the fleet grows beyond its largest size."""
        for item in fields(self):
            column = getattr(self, item.name)
            added = np.full(count, _EMPTY.get(item.name, nan)).astype(column.dtype)
            setattr(self, item.name, np.concatenate((column, added)))

    def clear(self, slot: int) -> None:
        """Empty the cells of a slot."""
        for item in fields(self):
            getattr(self, item.name)[slot] = _EMPTY.get(item.name, nan)


# Cells of each replica's next connection, and when a request on it would arrive.
#
# Owns the columns of connections (`cwnd_bytes` and those beside it). See `core.latency.tcp` for round trips of a body.
#
# Theory of operation: a shell reports each change, and the cells are valid until the next one. A connection that is
# yet to be opened has no congestion window (0) and the first windows. Without any report (NaN) a request counts as one
# round trip.


def record_connection(columns: Columns, slot: int, connection: OpenConnection | None) -> None:
    """Record the connection of the next request; `None` is a connection yet to be opened.

    A new connection paces if the last open one did: they have the same kernel.
    """
    pacing = _pacing(columns, slot) and Pacing() if connection is None else connection.pacing
    columns.pace_bytes[slot], columns.burst_bytes[slot] = (inf, inf) if pacing is None else pacing
    columns.cwnd_bytes[slot] = 0.0 if connection is None else connection.windows.cwnd
    columns.rwnd_bytes[slot] = RECEIVE_WINDOW_BYTES if connection is None else connection.windows.rwnd
    columns.sent_s[slot] = inf if connection is None else connection.sent_s


def one_way_s(columns: Columns, slot: int) -> float:
    """Return half a round trip, s; 0 while it is unknown or the replica has left (slot -1)."""
    if slot < 0:
        return 0.0
    rtt_s = columns.rtt_s.item(slot)  # without a numpy number between
    return 0.0 if rtt_s != rtt_s else rtt_s / 2


def arrival_s(columns: Columns, slot: int, body_bytes: int, *, now: float) -> float:
    """Return when a request dispatched now reaches the engine."""
    half_rtt_s = one_way_s(columns, slot)
    congestion = columns.cwnd_bytes.item(slot)
    if is_one_burst(body_bytes, columns.burst_bytes.item(slot)):
        n_round_trips = 1.0
    else:
        n_round_trips = _round_trips(columns, slot, body_bytes, congestion, 2.0 * half_rtt_s, now)
    if congestion == 0.0:
        n_round_trips += columns.connect_round_trips.item(slot)
    return now + half_rtt_s * (2.0 * n_round_trips - 1.0)


def _round_trips(columns: Columns, slot: int, body_bytes: int, congestion: float, rtt_s: float, now: float) -> float:
    """Return the round trips of a body once its connection is open."""
    pacing = _pacing(columns, slot)
    if congestion == 0.0:
        return round_trips_of_one(body_bytes, TcpWindows(), pacing)
    if (body_bytes <= INITIAL_WINDOW_BYTES and pacing is None) or congestion != congestion:
        return 1.0
    left = cwnd_after_idle(congestion, now - columns.sent_s.item(slot), rtt_s)
    return round_trips_of_one(body_bytes, TcpWindows(left, columns.rwnd_bytes.item(slot)), pacing)


def _pacing(columns: Columns, slot: int) -> Pacing | None:
    pace = columns.pace_bytes.item(slot)
    return Pacing(pace, columns.burst_bytes.item(slot)) if pace < inf else None
