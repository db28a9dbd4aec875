"""Reloads by SIGHUP and by a replaced file, with options that go first, and edits while the weights are frozen."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from gorgo.live.control.state_file import StateFile
from tests.proxy.conftest import Start
from tests.proxy.fakes import DONE, FakeReplica, chat, delta, hang, stream
from tests.proxy.followed import Followed, follow, regions
from tests.proxy.served import Served, gorgo
from tests.proxy.served import served as served_by

# --- `gorgo serve` as a process: SIGHUP, a file replaced by rename, a broken one, and options that go before the file.


CHAT = "/v1/chat/completions"


@dataclass
class ServedReloadProcess:
    """The process, a client of it, and its log line by line."""

    process: asyncio.subprocess.Process
    client: httpx.AsyncClient

    async def logged(self, event: str) -> dict[str, Any]:
        """The next line of that event."""
        assert self.process.stderr is not None
        while line := await asyncio.wait_for(self.process.stderr.readline(), 20):
            found: dict[str, Any] = json.loads(line)
            if found["event"] == event:
                return found
        raise AssertionError(f"the log ended without {event}")

    async def replica(self) -> str:
        response = await self.client.post(CHAT, content=chat(stream=True))
        assert response.status_code == 200
        return response.headers["x-gorgo-replica"]


@asynccontextmanager
async def served(path: Path, *options: str) -> AsyncIterator[ServedReloadProcess]:
    words = ("serve", "--config", str(path), "--bind", "127.0.0.1:0", "--admin-bind", "127.0.0.1:0", *options)
    pipe = asyncio.subprocess.PIPE
    environ = {
        **os.environ,
        "GORGO_ADMIN_TOKEN": "token-of-the-tests",
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "error",
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gorgo", *words, stdout=pipe, stderr=pipe, env=environ
    )
    try:
        assert process.stdout is not None
        said = re.search(rb"listening on (http://\S+)", await asyncio.wait_for(process.stdout.readline(), 30))
        assert said is not None
        async with httpx.AsyncClient(base_url=said[1].decode(), timeout=20) as client:
            yield ServedReloadProcess(process, client)
        process.terminate()
        await asyncio.wait_for(process.communicate(), 20)
        assert process.returncode == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def test_sighup_and_a_renamed_file_change_the_fleet_under_a_running_stream(start: Start, tmp_path: Path) -> None:
    a = await start.replica(hang(delta("a"), rest=[DONE]))
    b, c = await start.replica(stream(delta("b"), DONE)), await start.replica(stream(delta("c"), DONE))
    path = tmp_path / "regions.yaml"
    path.write_bytes(regions({"a": a}))
    async with (
        served(path) as proxy,
        proxy.client.stream("POST", CHAT, content=chat(stream=True, n=1, logprobs=True)) as response,
    ):
        raw = response.aiter_raw()
        got = await anext(raw)

        path.write_bytes(regions({"b": b}))
        proxy.process.send_signal(signal.SIGHUP)
        change = await proxy.logged("config_reloaded")
        assert (change["added"], change["removed"]) == (["b"], ["a"])
        assert "restart_needed" not in change  # --bind is what is in force, whatever the file says
        assert await proxy.replica() == "b"

        path.write_bytes(b"replicas: {}")
        proxy.process.send_signal(signal.SIGHUP)
        refusal = await proxy.logged("config_refused")
        assert refusal["level"] == "error"
        assert f"{path}: " in refusal["error"]
        assert "proxy" in refusal["error"]
        assert await proxy.replica() == "b"

        (tmp_path / "new").write_bytes(regions({"c": c}))
        os.replace(tmp_path / "new", path)
        assert (await proxy.logged("config_reloaded"))["added"] == ["c"]  # nobody asked: it looked
        assert await proxy.replica() == "c"

        a.release.set()
        got += b"".join([chunk async for chunk in raw])
        assert got == delta("a") + DONE


async def test_sigusr2_ends_no_stream_of_a_router_that_is_one_process(start: Start, tmp_path: Path) -> None:
    a = await start.replica(hang(delta("a"), rest=[DONE]))
    path = tmp_path / "regions.yaml"
    path.write_bytes(regions({"a": a}))
    async with (
        served(path) as proxy,
        proxy.client.stream("POST", CHAT, content=chat(stream=True, n=1, logprobs=True)) as response,
    ):
        raw = response.aiter_raw()
        got = await anext(raw)
        proxy.process.send_signal(signal.SIGUSR2)
        assert "proxy.processes" in (await proxy.logged("takeover_failed"))["reason"]
        a.release.set()
        assert got + b"".join([chunk async for chunk in raw]) == delta("a") + DONE


async def test_options_of_the_command_go_before_the_file_at_each_reload(start: Start, tmp_path: Path) -> None:
    a = await start.replica(stream(delta("a"), DONE))
    path, weights = tmp_path / "regions.yaml", tmp_path / "weights.json"
    path.write_bytes(regions({"a": a}, proxy={"policy": "nearest"}))
    weights.write_text('{"policy": "gorgo", "weights": {"w_rtt": 0.7}}')
    async with served(path, "--weights", str(weights)) as proxy:
        weights.unlink()  # read once, at the start
        path.write_bytes(regions({"a": a}, proxy={"policy": "random"}, limits={"max_attempts": 2}))
        proxy.process.send_signal(signal.SIGHUP)
        assert (await proxy.logged("config_reloaded"))["settings"] == ["limits.max_attempts"]
        shown = (await proxy.client.get("/metrics")).text
        assert 'gorgo_weight{policy="gorgo",weight="w_rtt"} 0.7' in shown
        assert "gorgo_weights_version 1.0" in shown


# --- An edit of policy or weights in regions.yaml while the weights are frozen takes effect at the end of the freeze.


STATUS = "/admin/status"


@pytest.fixture
async def replica(start: Start) -> FakeReplica:
    return await start.replica(stream(delta("a"), DONE))


async def in_force(followed: Followed) -> tuple[str, dict[str, float], int]:
    found = (await followed.fleet.admin.get("/admin/weights")).json()
    return found["policy"], found["weights"], found["version"]


async def differing(followed: Followed) -> dict[str, tuple[Any, Any, bool]]:
    rows = (await followed.fleet.admin.get(STATUS)).json()["differences"]
    return {row["key"]: (row["in_file"], row["in_force"], row["waits"]) for row in rows}


def reloads(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [
        record.fields  # type: ignore[attr-defined]
        for record in caplog.records
        if record.getMessage() == "config_reloaded"
    ]


async def test_edit_waits_for_the_end_of_the_freeze_and_the_log_says_so(
    start: Start, replica: FakeReplica, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    followed = await follow(start, tmp_path, regions({"a": replica}, proxy={"policy": "gorgo"}), [replica])
    admin = followed.fleet.admin
    await admin.post("/admin/freeze", json={"by": "me"})
    await followed.rewrite(regions({"a": replica}, proxy={"policy": "nearest"}, limits={"max_attempts": 2}))
    (fields,) = reloads(caplog)
    assert fields["settings"] == ["limits.max_attempts"]
    (reason,) = fields["not_in_force"].items()
    assert reason[0] == "proxy.policy"
    assert reason[1].startswith("frozen since")
    assert reason[1].endswith("by me; unfreeze applies it")
    assert (await in_force(followed))[0] == "gorgo"
    assert await differing(followed) == {"proxy.policy": ("nearest", "gorgo", True)}
    (alert,) = [row["text"] for row in (await admin.get(STATUS)).json()["alerts"]]
    assert alert == (
        "Edit not in force: proxy.policy is gorgo, in regions.yaml nearest: frozen; `gorgo unfreeze` applies the file"
    )
    answer = (await admin.post("/admin/unfreeze", json={})).json()
    assert (answer["policy"], answer["version"], answer["frozen"]) == ("nearest", 2, None)
    assert await differing(followed) == {}
    assert (await admin.get("/admin/weights")).json()["history"][-1]["source"] == "reload"


async def test_of_two_edits_during_a_freeze_the_last_holds_and_one_that_is_undone_changes_nothing(
    start: Start, replica: FakeReplica, tmp_path: Path
) -> None:
    texts = {
        value: regions({"a": replica}, proxy={"policy": "gorgo", "weights": {"w_rtt": value}}) for value in (0.5, 0.6)
    }
    followed = await follow(start, tmp_path, texts[0.5], [replica])
    admin = followed.fleet.admin
    for value, version in ((0.5, 1), (0.6, 2)):
        await admin.post("/admin/freeze", json={})
        await followed.rewrite(regions({"a": replica}, proxy={"policy": "nearest"}))
        await followed.rewrite(texts[value])
        assert await differing(followed) == ({} if value == 0.5 else {"proxy.weights.w_rtt": (0.6, 0.5, True)})
        await admin.post("/admin/unfreeze", json={})
        found = await in_force(followed)
        assert (found[0], found[1]["w_rtt"], found[2]) == ("gorgo", value, version)


async def test_freeze_of_other_weights_than_the_files_does_not_end_with_the_files(
    start: Start, replica: FakeReplica, tmp_path: Path
) -> None:
    followed = await follow(start, tmp_path, regions({"a": replica}, proxy={"policy": "gorgo"}), [replica])
    await followed.fleet.admin.post("/admin/freeze", json={"weights": {"w_rtt": 0.7}})
    assert await differing(followed) == {"proxy.weights.w_rtt": (0.5, 0.7, False)}
    await followed.rewrite(regions({"a": replica}, proxy={"policy": "gorgo"}, limits={"max_attempts": 2}))
    await followed.fleet.admin.post("/admin/unfreeze", json={})
    assert (await in_force(followed))[1]["w_rtt"] == 0.7


async def test_shadow_policy_that_fits_only_the_waiting_policy_is_set_with_it(
    start: Start, replica: FakeReplica, tmp_path: Path
) -> None:
    state = StateFile(tmp_path / "state.json")
    edited = regions({"a": replica}, proxy={"policy": "prefix-cache", "shadow_policy": "gorgo"})
    before = regions({"a": replica}, proxy={"policy": "gorgo-ms"})
    first = await follow(start, tmp_path, before, [replica], state_file=state)
    await first.fleet.admin.post("/admin/freeze", json={})
    await first.rewrite(edited)
    assert (await differing(first))["proxy.shadow_policy"] == ("gorgo", None, True)
    await first.fleet.stop()
    # A start with the frozen policy and the file's shadow policy is no error either.
    followed = await follow(start, tmp_path, edited, [replica], state_file=state)
    assert (await in_force(followed))[0] == "gorgo-ms"
    assert (await differing(followed))["proxy.shadow_policy"] == ("gorgo", None, True)
    await followed.fleet.admin.post("/admin/unfreeze", json={})
    assert (await in_force(followed))[0] == "prefix-cache"
    assert await differing(followed) == {}


async def test_status_has_live_weights_drain_marks_and_keys_that_need_a_restart(
    start: Start, replica: FakeReplica, tmp_path: Path
) -> None:
    followed = await follow(start, tmp_path, regions({"a": replica}, proxy={"policy": "gorgo"}), [replica])
    admin = followed.fleet.admin
    await admin.put("/admin/weights", json={"weights": {"w_rtt": 0.7}})
    await admin.post("/admin/replicas/a/drain", json={})
    await followed.rewrite(regions({"a": replica}, proxy={"policy": "gorgo", "bind": "127.0.0.1:1"}))
    assert await differing(followed) == {
        "proxy.bind": ("127.0.0.1:1", "127.0.0.1:0", True),
        "proxy.weights.w_rtt": (0.5, 0.7, False),
        "replicas.a.draining": (False, True, False),
    }
    alerts = [row["text"] for row in (await admin.get(STATUS)).json()["alerts"]]
    assert "Edit not in force: proxy.bind is 127.0.0.1:0, in regions.yaml 127.0.0.1:1: needs a restart" in alerts


async def difference(proxy: Served, key: str) -> dict[str, Any]:
    async with asyncio.timeout(20):
        while True:
            rows = (await proxy.admin.get(STATUS)).json()["differences"]
            for row in rows:
                if row["key"] == key:
                    return dict(row)
            await asyncio.sleep(0.02)


@pytest.mark.system
async def test_processes_apply_the_edit_at_unfreeze_before_and_after_a_restart(
    replica: FakeReplica, tmp_path: Path
) -> None:
    file, state = tmp_path / "regions.yaml", ("--state", str(tmp_path / "state.json"))
    file.write_bytes(regions({"a": replica}, proxy={"policy": "gorgo"}))
    async with served_by(tmp_path, *state) as proxy:
        assert (await gorgo("freeze", "--url", proxy.admin_url)).returncode == 0
        file.write_bytes(regions({"a": replica}, proxy={"policy": "nearest"}))
        proxy.process.send_signal(signal.SIGHUP)
        assert (await difference(proxy, "proxy.policy"))["in_force"] == "gorgo"
        shown = (await gorgo("status", "--url", proxy.admin_url)).stdout
        assert "! Edit not in force: proxy.policy is gorgo, in regions.yaml nearest: frozen" in shown
        assert "policy nearest" in (await gorgo("check", "--config", str(file))).stdout
    async with served_by(tmp_path, *state) as proxy:
        assert (await difference(proxy, "proxy.policy"))["waits"]
        done = await gorgo("unfreeze", "--url", proxy.admin_url)
        assert done.stdout.startswith("policy nearest, version 2, not frozen"), done
    async with served_by(tmp_path, *state) as proxy:
        assert (await proxy.weights())["policy"] == "nearest"
        assert (await gorgo("freeze", "--url", proxy.admin_url)).returncode == 0
        file.write_bytes(regions({"a": replica}, proxy={"policy": "gorgo", "weights": {"w_rtt": 0.6}}))
        proxy.process.send_signal(signal.SIGHUP)
        await difference(proxy, "proxy.policy")
        assert "w_rtt=0.6" in (await gorgo("unfreeze", "--url", proxy.admin_url)).stdout
    async with served_by(tmp_path, *state) as proxy:
        assert (await proxy.weights())["weights"]["w_rtt"] == 0.6
