"""Tests of the ports that tests give to programs."""

from __future__ import annotations

import socket

from tests.ports import free_port, free_ports


def test_no_port_is_given_twice_and_none_is_of_the_kernel_s_own_range() -> None:
    found = [free_port(), *free_ports(500)]
    assert len(set(found)) == 501
    assert all(1024 < port < 32_768 for port in found)


def test_port_that_somebody_listens_on_is_not_given() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", free_port()))
        held.listen()
        assert held.getsockname()[1] not in free_ports(2_500)
