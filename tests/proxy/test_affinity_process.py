"""Session affinity over a restart of `gorgo serve` and over two of them, for clients without a session id."""

from __future__ import annotations

from pathlib import Path

from tests.proxy.conftest import Start
from tests.proxy.fakes import DONE, delta, stream
from tests.proxy.followed import regions
from tests.proxy.served import Served, served

SESSIONS = [f"You are assistant number {number}. " * 40 for number in range(12)]


async def homes(proxy: Served) -> list[str]:
    """The replica of each session."""
    found = []
    for system in SESSIONS:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": "Hello"}]
        response = await proxy.client.post("/v1/chat/completions", json={"messages": messages, "stream": True})
        assert response.status_code == 200
        found.append(response.headers["x-gorgo-replica"])
    return found


async def test_restart_moves_no_session_and_two_proxies_agree(start: Start, tmp_path: Path) -> None:
    replicas = {name: await start.replica(*[stream(delta("a"), DONE)] * 40) for name in ("a", "b", "c")}
    (tmp_path / "regions.yaml").write_bytes(regions(replicas, proxy={"policy": "simple-session-affinity"}))
    async with served(tmp_path) as first, served(tmp_path) as second:
        before = await homes(first)
        assert await homes(second) == before
    async with served(tmp_path) as restarted:
        assert await homes(restarted) == before
    assert len(set(before)) > 1
