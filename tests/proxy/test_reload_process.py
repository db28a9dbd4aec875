"""`gorgo serve` as a process: SIGHUP, a file replaced by rename, a broken one, and options that go before the file."""

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

from tests.proxy.conftest import Start
from tests.proxy.fakes import DONE, chat, delta, hang, stream
from tests.proxy.followed import regions

CHAT = "/v1/chat/completions"


@dataclass
class Served:
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
async def served(path: Path, *options: str) -> AsyncIterator[Served]:
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
            yield Served(process, client)
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
