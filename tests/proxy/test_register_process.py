"""Replicas that register at `gorgo serve` as a process, over a kill and a start."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.proxy.conftest import Start
from tests.proxy.fakes import DONE, chat, delta, hang, stream
from tests.proxy.followed import regions
from tests.proxy.served import Served, served

CHAT = "/v1/chat/completions"


async def fleet(proxy: Served) -> dict[str, bool]:
    rows = (await proxy.admin.get("/admin/fleet")).json()["replicas"]
    return {row["name"]: row["registered"] for row in rows}


@pytest.mark.system
async def test_registered_replica_outlives_a_kill_and_a_removed_one_does_not_come_back(
    start: Start, tmp_path: Path
) -> None:
    quick = stream(delta("x"), DONE)
    a, b, c = await start.replica(quick), await start.replica(quick), await start.replica(hang(delta("c")))
    only_a = {"url": a.url, "models": ["a"]}
    (tmp_path / "regions.yaml").write_bytes(regions({"a": only_a}))
    state = ("--state", str(tmp_path / "state.json"))
    async with served(tmp_path, *state) as proxy:
        for name, replica in {"b": b, "c": c}.items():
            entry = {"name": name, "region": "here", "url": replica.url, "models": [name]}
            done = await proxy.admin.post("/admin/replicas", json=entry)
            assert (done.status_code, done.json()["durable"]) == (201, True)
        async with proxy.client.stream("POST", CHAT, content=chat(stream=True, model="c")) as found:
            assert found.headers["x-gorgo-replica"] == "c"
            removed = await proxy.admin.delete("/admin/replicas/c")
            assert (removed.status_code, removed.json()["in_flight"]) == (202, 1)
            assert await fleet(proxy) == {"a": False, "b": True, "c": True}  # it drains
            proxy.process.send_signal(signal.SIGKILL)
            await proxy.process.wait()
    async with served(tmp_path, *state) as proxy:
        assert await fleet(proxy) == {"a": False, "b": True}
        answer = await proxy.client.post(CHAT, content=chat(stream=True, model="b"))
        assert answer.headers["x-gorgo-replica"] == "b"
    (tmp_path / "regions.yaml").write_bytes(regions({"a": only_a, "b": b}))
    async with served(tmp_path, *state) as proxy:
        assert await fleet(proxy) == {"a": False, "b": False}
    assert "registered" not in json.loads((tmp_path / "state.json").read_text())


async def test_registered_replica_whose_region_is_no_longer_in_the_file_is_left_out_at_the_start(
    start: Start, tmp_path: Path
) -> None:
    a = await start.replica(stream(delta("x"), DONE))
    file = json.loads(regions({"a": a}))
    file["regions"].append({"name": "far"})
    (tmp_path / "regions.yaml").write_text(json.dumps(file))
    state = ("--state", str(tmp_path / "state.json"))
    async with served(tmp_path, *state) as proxy:
        entry = {"name": "b", "region": "far", "url": a.url}
        assert (await proxy.admin.post("/admin/replicas", json=entry)).status_code == 201
    (tmp_path / "regions.yaml").write_bytes(regions({"a": a}))
    async with served(tmp_path, *state) as proxy:
        assert await fleet(proxy) == {"a": False}
