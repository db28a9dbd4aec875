"""Cells of each replica's next connection, and when a request on it would arrive.

Owns the columns of connections (`cwnd_bytes` and those beside it). See `core.latency.tcp` for round trips of a body.

Theory of operation: a shell reports each change, and the cells are valid until the next one. A connection that is yet
to be opened has no congestion window (0) and the first windows. Without any report (NaN) a request counts as one round
trip.
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
    is_one_burst,
    round_trips_of_one,
)
from gorgo.core.messages.request import OpenConnection


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
