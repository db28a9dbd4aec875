"""`gorgo serve` and `gorgo engine --push` as processes: a restarted router knows the cache again within 5 s."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.live.cache_push.test_four_states import free_port, prompt

pytestmark = pytest.mark.system

ADMIN, PUSH = "token-of-an-operator", "token-of-an-engine"
#: Of a whole push, with the time that two processes take beside other tests.
LIMIT_S = 5.0 + 10.0


def regions(folder: Path, *, engine: int, data: int, admin: int) -> Path:
    document = {
        "proxy": {"region": "here", "bind": f"127.0.0.1:{data}", "admin_bind": f"127.0.0.1:{admin}"},
        "regions": [{"name": "here"}],
        "replicas": [
            {
                "name": "r0",
                "region": "here",
                "url": f"http://127.0.0.1:{engine}",
                "models": ["gorgo-sim"],
                "push_token_env": "PUSH",
            }
        ],
        "models": [{"name": "gorgo-sim", "tokenizer": "simulated"}],
        "simulation": {"rtt_ms": {"here": 0.0}},
    }
    path = folder / "regions.yaml"
    path.write_text(json.dumps(document))
    return path


@asynccontextmanager
async def gorgo(*words: str, environ: dict[str, str]) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gorgo", *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **environ},
    )
    try:
        assert process.stdout is not None
        assert b"listening on" in await asyncio.wait_for(process.stdout.readline(), 60)
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def until(condition: Callable[[], Awaitable[bool]], limit_s: float = 60.0) -> float:
    """Poll; return the time that it took."""
    began_s = time.monotonic()
    async with asyncio.timeout(limit_s):
        while not await condition():
            await asyncio.sleep(0.05)
    return time.monotonic() - began_s


async def test_restarted_router_knows_the_cache_again_within_one_whole_push(tmp_path: Path) -> None:
    engine, data, admin = free_port(), free_port(), free_port()
    path = str(regions(tmp_path, engine=engine, data=data, admin=admin))
    headers = {"authorization": f"Bearer {ADMIN}"}
    router = {"GORGO_ADMIN_TOKEN": ADMIN, "PUSH": PUSH}
    push = ("engine", "--config", path, "--replica", "r0", "--push", f"http://127.0.0.1:{admin}")
    async with (
        gorgo(*push, environ={"PUSH": PUSH}),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{admin}", headers=headers, timeout=10) as operator,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{data}", timeout=30) as client,
    ):

        async def cache() -> Any:
            (row,) = (await operator.get("/admin/fleet")).json()["replicas"]
            return row["cache"]

        async def ask() -> httpx.Response:
            body = {"model": "gorgo-sim", "prompt": prompt(1), "max_tokens": 1}
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            return answer

        async def known() -> bool:
            found = await cache()
            return bool(found["source"] == "push" and found["blocks"] >= 30)

        async with gorgo("serve", "--config", path, environ=router):
            await ask()
            await until(known)
            assert (await operator.get("/metrics", headers={"authorization": f"Bearer {PUSH}"})).status_code == 401
        async with gorgo("serve", "--config", path, environ=router):
            assert await until(known, LIMIT_S) < LIMIT_S
            answer = await ask()
            assert int(answer.headers["x-gorgo-estimated-cached-tokens"]) >= 480, "from the push: it served none before"
