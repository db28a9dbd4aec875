"""Ten thousand clients that connect in the same instant: those within the bound are served, and nothing is left of any.

The proxy is a process of its own, since both sides need a descriptor per connection.
"""

from __future__ import annotations

import asyncio
import os
import resource
import select
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gorgo.config.model import LimitsConfig
from tests.proxy.conftest import until
from tests.proxy.fakes import DONE, chat, delta, running, stream
from tests.proxy.served import served

CLIENTS = 10_000
#: Of the test: each client, and its own.
DESCRIPTORS = CLIENTS + 500
REQUEST = b"GET /health HTTP/1.1\r\nhost: g\r\n\r\n"
#: A third of what all heads in progress may take in sum; an idle connection has some ten kilobytes.
MEMORY_BYTES_MAX = 200 * 1024 * 1024
ALL_S_MAX = 120.0
CONFIG = """
proxy: {{region: here, policy: gorgo}}
regions: [{{name: here}}]
replicas: [{{name: r, region: here, url: '{url}'}}]
"""


@contextmanager
def descriptors(wanted: int) -> Iterator[None]:
    """Raise the limit of this process and of those that it starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"needs {wanted} descriptors, the limit is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def connect_all(address: tuple[str, int]) -> tuple[list[socket.socket], int, int]:
    """Connect all at once and send a request on each; return the sockets, and how many were answered and closed."""
    poll, clients = select.epoll(), {}
    for _ in range(CLIENTS):
        client = socket.socket()
        client.setblocking(False)
        client.connect_ex(address)
        clients[client.fileno()] = client
        poll.register(client, select.EPOLLOUT)
    answered = closed = 0
    until_s = time.monotonic() + ALL_S_MAX
    while answered + closed < CLIENTS and time.monotonic() < until_s:
        for descriptor, event in poll.poll(1.0):
            try:
                if event == select.EPOLLOUT:
                    clients[descriptor].send(REQUEST)
                    poll.modify(descriptor, select.EPOLLIN)
                    continue
                said = clients[descriptor].recv(1 << 16)
            except OSError:
                said = b""
            poll.unregister(descriptor)
            answered += said.startswith(b"HTTP/1.1 200")
            closed += not said
    poll.close()
    return list(clients.values()), answered, closed


def resident_bytes(process: int) -> int:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) * 1024


async def test_ten_thousand_connections_at_once_are_served_up_to_the_bound(tmp_path: Path) -> None:
    with descriptors(DESCRIPTORS):
        async with running(stream(delta("good"), DONE)) as replica:
            (tmp_path / "regions.yaml").write_text(CONFIG.format(url=replica.url))
            async with served(tmp_path) as proxy:
                pid = proxy.process.pid
                assert (await proxy.client.get("/health")).status_code == 200
                memory, open_before = resident_bytes(pid), len(os.listdir(f"/proc/{pid}/fd"))
                url = proxy.client.base_url
                clients, answered, closed = await asyncio.to_thread(connect_all, (url.host, url.port or 80))
                try:
                    bound = LimitsConfig().max_connections
                    assert answered + closed == CLIENTS
                    # Idle ones end in time, so that some of those that come late are served too.
                    assert answered >= bound - 10
                    assert len(os.listdir(f"/proc/{pid}/fd")) - open_before <= bound
                    assert resident_bytes(pid) - memory < MEMORY_BYTES_MAX
                finally:
                    for client in clients:
                        client.close()
                await until(lambda: len(os.listdir(f"/proc/{pid}/fd")) <= open_before + 10, 60.0)
                response = await proxy.client.post("/v1/chat/completions", content=chat(stream=True))
                assert response.status_code == 200
                assert response.content.endswith(DONE)
