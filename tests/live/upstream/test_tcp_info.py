from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest

from gorgo.core.latency.ttft import PACING_GAIN, Pacing, TcpWindows
from gorgo.live.upstream.connection import bbr_state, read_tcp_info

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what Linux tells")


@pytest.fixture
def connection() -> Iterator[socket.socket]:
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as server,
        closing(socket.create_connection(server.getsockname())) as client,
    ):
        yield client


def info(*, segments_sent: int, size: int = 232) -> bytes:
    fields = {
        16: (4, 1_448),
        68: (4, 90_000),
        80: (4, 20),
        104: (8, 500_000),
        156: (4, segments_sent),
        228: (4, 99_000),
    }
    made = bytearray(size)
    for offset, (width, value) in fields.items():
        made[offset : offset + width] = value.to_bytes(width, sys.byteorder)
    return bytes(made[:size])


def test_windows_are_bytes_and_the_pace_is_for_a_round_trip() -> None:
    told = TcpWindows(28_960.0, 99_000.0), Pacing(45_000.0, 1_448.0)
    assert read_tcp_info(info(segments_sent=30)) == told


def test_the_first_ten_segments_of_a_connection_are_a_burst() -> None:
    found = read_tcp_info(info(segments_sent=4))
    assert found is not None
    assert found[1].burst == 6 * 1_448.0


def test_a_kernel_that_does_not_tell_the_receiver_s_window_tells_nothing() -> None:
    assert read_tcp_info(info(segments_sent=4)[:224]) is None


def test_zeros_do_not_stop_a_count_of_flights() -> None:
    assert read_tcp_info(bytes(16) + (1_448).to_bytes(4, sys.byteorder) + bytes(212)) == (
        TcpWindows(1_448.0, 1_448.0),
        Pacing(1_448.0, 14_480.0),
    )


def test_a_sender_that_does_not_pace_and_a_closed_socket_tell_nothing(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
    assert bbr_state(connection) is None
    connection.close()
    assert bbr_state(connection) is None


def test_a_real_new_sender_paces_as_the_model_says(connection: socket.socket) -> None:
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
    except OSError:
        pytest.skip("this kernel has no BBR")
    found = bbr_state(connection)
    assert found is not None
    assert bbr_state(connection, paces=True) == found
    windows, pacing = found
    assert pacing.bytes_per_round_trip == pytest.approx(PACING_GAIN * windows.cwnd, rel=0.05)
    assert pacing.burst == pytest.approx(windows.cwnd)
