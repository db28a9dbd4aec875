"""`gorgo serve` as a process, and commands of `gorgo` beside it."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

TOKEN = "token-of-the-tests"


@dataclass
class Served:
    """The process, and clients of its two listeners."""

    process: asyncio.subprocess.Process
    client: httpx.AsyncClient
    admin: httpx.AsyncClient
    admin_url: str

    async def weights(self) -> Any:
        return (await self.admin.get("/admin/weights")).json()


@asynccontextmanager
async def served(
    folder: Path, *options: str, program: Sequence[str] = ("-m", "gorgo"), start_s: float = 30.0
) -> AsyncIterator[Served]:
    """The proxy, killed at the end of the block if it has not ended. `program`: what Python runs."""
    words = ("serve", "--config", str(folder / "regions.yaml"), "--bind", "127.0.0.1:0", "--admin-bind", "127.0.0.1:0")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *program, *words, *options),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=environ(),
    )
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), start_s)
        said = re.search(rb"listening on (http://\S+) \(admin (http://\S+)\)", line)
        assert said is not None
        data_url, admin_url = said[1].decode(), said[2].decode()
        headers = {"authorization": f"Bearer {TOKEN}"}
        async with (
            httpx.AsyncClient(base_url=data_url, timeout=20) as client,
            httpx.AsyncClient(base_url=admin_url, timeout=20, headers=headers) as admin,
        ):
            yield Served(process, client, admin, admin_url)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def environ() -> dict[str, str]:
    return {**os.environ, "GORGO_ADMIN_TOKEN": TOKEN, "PYTHONUNBUFFERED": "1", "LOGNAME": "tester"}


async def gorgo(*words: str) -> subprocess.CompletedProcess[str]:
    def run() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "gorgo", *words]
        return subprocess.run(command, env=environ(), capture_output=True, text=True, timeout=30, check=False)

    return await asyncio.to_thread(run)
