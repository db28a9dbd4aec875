"""`gorgo serve` with a policy that learns, as a process: what becomes of its model when something is killed or cut."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.live.training.bench import eventually
from tests.proxy.fakes import DONE, USAGE, FakeReplica, chat, delta, running, stream
from tests.proxy.followed import regions
from tests.proxy.served import TOKEN, Served, gorgo, served

CHAT = "/v1/chat/completions"
LEARNING = {"first_samples": 20, "round_samples": 20, "epochs": 5}
ANSWER = stream(delta("a"), delta("b"), USAGE, DONE)


async def requests(proxy: Served, count: int) -> None:
    """Send streams; each is answered."""
    for number in range(count):
        content = chat(stream=True, messages=[{"role": "user", "content": "x" * (100 + 37 * number)}])
        assert (await proxy.client.post(CHAT, content=content)).status_code == 200


async def command(proxy: Served, *words: str) -> str:
    """Return the last line of a command about this proxy."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gorgo", *words),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "GORGO_ADMIN_TOKEN": TOKEN, "GORGO_ADMIN_URL": proxy.admin_url},
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode().splitlines()[-1]


async def shown(proxy: Served) -> Any:
    return (await proxy.admin.get("/admin/model")).json()


async def trained(proxy: Served, version: int) -> Any:
    """Wait for a model of at least this version, and return what is shown."""
    async with asyncio.timeout(60):
        while True:
            found = await shown(proxy)
            if found["model"] is not None and found["model"]["version"] >= version:
                return found
            await asyncio.sleep(0.05)


def write(folder: Path, replica: FakeReplica, **learning: Any) -> None:
    proxy = {"policy": "lodestar", "learning": LEARNING | learning}
    (folder / "regions.yaml").write_bytes(regions({"a": replica, "b": {"url": replica.url}}, proxy=proxy))


@pytest.mark.system  # test_service.py has each part of it in seconds
async def test_a_model_outlives_its_process_and_the_proxy_and_routing_goes_on_without_it(tmp_path: Path) -> None:
    state, file = tmp_path / "state.json", tmp_path / "state.json.lodestar.npz"
    options = ("--state", str(state), "--outcome-log", str(tmp_path / "outcomes.jsonl"))
    async with running(ANSWER) as replica:
        write(tmp_path, replica)
        async with served(tmp_path, *options) as proxy:
            await requests(proxy, 40)
            first = await trained(proxy, 1)
            assert (first["policy"], first["is_shadow"], first["model"]["kind"]) == ("lodestar", False, "mlp")
            worker = first["training"]["pid"]
            os.kill(worker, signal.SIGKILL)
            await requests(proxy, 40)
            second = await trained(proxy, first["model"]["version"] + 1)
            assert second["training"]["failures"] == 1
            assert second["training"]["pid"] != worker
            await eventually(file.exists)
            assert (await proxy.admin.post("/admin/freeze", json={})).status_code == 200
            await requests(proxy, 40)
            await asyncio.sleep(2.5)  # two steps of the training
            frozen = await shown(proxy)
            assert (frozen["training"]["state"], frozen["training"]["pid"]) == ("frozen", None)
            assert (await proxy.admin.post("/admin/unfreeze", json={})).status_code == 200
            last = await trained(proxy, frozen["model"]["version"] + 1)
            metrics = (await proxy.client.get("/metrics")).text
            assert f"gorgo_model_version {float(last['model']['version'])}" in metrics
            assert 'gorgo_fallbacks_total{rule="cold_start"}' in metrics
            assert 'gorgo_model_error_ratio_count{target="ttft"}' in metrics
            line = await command(proxy, "status")
            assert line.startswith(f"lodestar learned: model {last['model']['version']} (mlp) of "), line
            proxy.process.kill()
            await eventually(lambda: not Path(f"/proc/{last['training']['pid']}").exists())
        async with served(tmp_path, *options) as proxy:
            again = (await shown(proxy))["model"]
            assert (again["version"], again["file"]) == (last["model"]["version"], str(file))
        learned = tmp_path / "learned.npz"
        result = await gorgo(
            *("learn", str(tmp_path / "outcomes.jsonl"), "--policy", "lodestar", "--out", str(learned)), "--no-ablation"
        )
        assert result.returncode == 0, result.stderr
        file.write_bytes(file.read_bytes()[:200])
        async with served(tmp_path, *options) as proxy:
            assert (await shown(proxy))["model"] is None
            await requests(proxy, 3)
            write(tmp_path, replica, model_file=str(learned), online=False)
            assert (await proxy.admin.post("/admin/reload", json={})).status_code == 200
            offline = await trained(proxy, 1)
            assert offline["model"]["file"] == str(learned)
            assert offline["training"]["state"] == "off"
