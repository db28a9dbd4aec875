"""The way to each replica's engine, as cells: what the next request to it travels on, and when it would be there.

Owns the columns of connections (`cwnd_bytes` and those beside it). How many round trips a body takes on one is
`path`; which connections there are is told by whoever has them.

Theory of operation: a shell tells of a change, and the cells stand until the next one. A connection that is yet to be
opened has no congestion window (0) and the first windows; where nobody ever tells (NaN) every request counts as one
round trip.
"""

from __future__ import annotations

from math import inf

from gorgo.core.fleet.columns import Columns
from gorgo.core.latency.tcp import (
    INITIAL_WINDOW_BYTES,
    RECEIVE_WINDOW_BYTES,
    Pacing,
    TcpWindows,
    cwnd_after_idle,
    round_trips_of_one,
)
from gorgo.core.messages.request import OpenConnection


def record_connection(columns: Columns, slot: int, connection: OpenConnection | None) -> None:
    """What the next request to the replica travels on; `None` is a connection yet to be opened.

    Whether that one will pace is told by the last one that was open: they have the same kernel.
    """
    pacing = _pacing(columns, slot) and Pacing() if connection is None else connection.pacing
    columns.pace_bytes[slot], columns.burst_bytes[slot] = (inf, inf) if pacing is None else pacing
    columns.cwnd_bytes[slot] = 0.0 if connection is None else connection.windows.cwnd
    columns.rwnd_bytes[slot] = RECEIVE_WINDOW_BYTES if connection is None else connection.windows.rwnd
    columns.sent_s[slot] = inf if connection is None else connection.sent_s


def one_way_s(columns: Columns, slot: int) -> float:
    """Half a round trip, s; 0 while it is unknown or the replica has left (slot -1), because a clock needs a number."""
    if slot < 0:
        return 0.0
    rtt_s = float(columns.rtt_s[slot])
    return 0.0 if rtt_s != rtt_s else rtt_s / 2


def arrival_s(columns: Columns, slot: int, body_bytes: int, *, now: float) -> float:
    """When a request dispatched now has reached the replica's engine."""
    delay_s = one_way_s(columns, slot)
    congestion, pacing = float(columns.cwnd_bytes[slot]), _pacing(columns, slot)
    if congestion == 0.0:
        trips = round_trips_of_one(body_bytes, TcpWindows(), pacing) + float(columns.connect_round_trips[slot])
    elif (body_bytes <= INITIAL_WINDOW_BYTES and pacing is None) or congestion != congestion:
        trips = 1.0
    else:
        left = cwnd_after_idle(congestion, now - float(columns.sent_s[slot]), 2.0 * delay_s)
        trips = round_trips_of_one(body_bytes, TcpWindows(left, float(columns.rwnd_bytes[slot])), pacing)
    return now + delay_s * (2.0 * trips - 1.0)


def _pacing(columns: Columns, slot: int) -> Pacing | None:
    pace = float(columns.pace_bytes[slot])
    return Pacing(pace, float(columns.burst_bytes[slot])) if pace < inf else None
