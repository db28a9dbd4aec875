"""When a request is at its engine: half a round trip, and a whole one for each flight and handshake before it."""

from __future__ import annotations

from math import inf, nan

import pytest

from gorgo.core.fleet.replica import Columns, arrival_s, one_way_s, record_connection
from gorgo.core.latency.ttft import Pacing, TcpWindows
from gorgo.core.messages.request import OpenConnection

WARM, COLD = TcpWindows(114_600.0, 131_070.0), TcpWindows(14_600.0, 65_535.0)


def columns(rtt_s: float = 0.1, *, connect_round_trips: float = 1.0) -> Columns:
    made = Columns.empty()
    made.grow()
    made.rtt_s[0], made.connect_round_trips[0] = rtt_s, connect_round_trips
    return made


@pytest.mark.parametrize(("slot", "rtt_s", "expected_s"), [(0, 0.1, 0.05), (0, nan, 0.0), (-1, 0.1, 0.0)])
def test_one_way_is_half_a_round_trip_and_zero_where_that_is_unknown(
    slot: int, rtt_s: float, expected_s: float
) -> None:
    assert one_way_s(columns(rtt_s), slot) == expected_s
    assert arrival_s(columns(rtt_s), slot, 500, now=7.0) == 7.0 + expected_s


@pytest.mark.parametrize(
    ("connection", "body_bytes", "trips"),
    [
        # Where nobody tells of connections, one round trip, whatever the body.
        ("untold", 500, 1),
        ("untold", 1_000_000, 1),
        # A connection yet to be opened: two more trips with TLS, and the flights of a cold one.
        (None, 500, 1 + 2),
        (None, 100_000, 3 + 2),
        (OpenConnection(COLD, inf), 14_600, 1),
        (OpenConnection(COLD, inf), 14_601, 2),
        (OpenConnection(WARM, 9.9), 100_000, 1),
        (OpenConnection(WARM, inf), 100_000, 1),
        # Idle for four time-outs of 0.3 s each: four halvings leave the first window.
        (OpenConnection(WARM, 8.8), 100_000, 3),
        # Idle for one: 57,300 bytes leave, and the rest a trip later.
        (OpenConnection(WARM, 9.69), 100_000, 2),
        (OpenConnection(WARM, 9.71), 100_000, 1),
        # A sender that paces: 10,000 bytes leave at once, the rest at 40,000 a trip, also of what fits the window.
        (OpenConnection(WARM, inf, Pacing(40_000.0, 10_000.0)), 10_000, 1.0),
        (OpenConnection(WARM, inf, Pacing(40_000.0, 10_000.0)), 14_000, 1.1),
        (OpenConnection(WARM, inf, Pacing(40_000.0, 10_000.0)), 50_000, 2.0),
    ],
)
def test_a_request_arrives_half_a_trip_before_the_first_byte_of_an_answer_that_takes_no_time(
    connection: OpenConnection | str | None, body_bytes: int, trips: float
) -> None:
    made = columns(connect_round_trips=2.0)
    if not isinstance(connection, str):
        record_connection(made, 0, connection)
    assert arrival_s(made, 0, body_bytes, now=10.0) == pytest.approx(10.0 + 0.1 * (trips - 0.5))


def test_a_connection_s_windows_and_pace_stand_in_the_columns() -> None:
    made = columns()

    def shown() -> tuple[float, ...]:
        cells = (made.cwnd_bytes, made.rwnd_bytes, made.sent_s, made.pace_bytes, made.burst_bytes)
        return tuple(float(column[0]) for column in cells)

    record_connection(made, 0, OpenConnection(WARM, 9.9, Pacing(40_000.0, 10_000.0)))
    assert shown() == (114_600.0, 131_070.0, 9.9, 40_000.0, 10_000.0)
    record_connection(made, 0, None)
    assert shown() == (0.0, 65_535.0, inf, *Pacing()), "the next one will pace as the last one did"
    record_connection(made, 0, OpenConnection(COLD, 3.0))
    assert shown() == (14_600.0, 65_535.0, 3.0, inf, inf)
    record_connection(made, 0, None)
    assert shown() == (0.0, 65_535.0, inf, inf, inf)
