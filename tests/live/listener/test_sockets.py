"""Where the proxy listens, and as which socket."""

from __future__ import annotations

import socket

import pytest

from gorgo.errors import ConfigError
from gorgo.live.listener import sockets
from gorgo.live.listener.sockets import ServerAddresses, address_of, listening


@pytest.mark.parametrize(
    ("addresses", "data", "admin"),
    [
        (ServerAddresses(("0.0.0.0", 80), ("::1", 9090)), "http://0.0.0.0:80", "http://[::1]:9090"),
        (ServerAddresses(("::", 80), ("h", 1), tls=True), "https://[::]:80", "http://h:1"),
    ],
)
def test_addresses_are_urls_and_tls_is_of_the_data_listener_alone(
    addresses: ServerAddresses, data: str, admin: str
) -> None:
    assert (addresses.data_url, addresses.admin_url) == (data, admin)


def test_a_listener_may_be_bound_again_at_once_and_sends_without_delay() -> None:
    with listening("127.0.0.1:0", "proxy.bind") as listener:
        host, port = address_of(listener)
        assert (host, listener.family) == ("127.0.0.1", socket.AF_INET)
        assert port > 0
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR) != 0
        assert listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
        with socket.create_connection((host, port), timeout=5):
            pass
        with pytest.raises(ConfigError, match=r"proxy\.admin_bind: cannot listen on"):
            listening(f"127.0.0.1:{port}", "proxy.admin_bind").__enter__()
    assert listener.fileno() == -1


def test_a_thousand_connections_may_wait_to_be_accepted() -> None:
    assert sockets.BACKLOG == 1024
