"""A proxy in this process before real engines, and what a test asks its admin listener."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from gorgo.config.fleet import ReplicaConfig
from gorgo.config.model import Config, LimitsConfig, OverloadConfig, ProxyConfig, RegionConfig
from gorgo.config.values import EngineName
from gorgo.live.listener.sockets import ServerAddresses
from gorgo.live.process import ProcessOptions
from gorgo.policies.registry import make_policy
from gorgo.proxy.server import serve

_TOKEN = "token-of-the-tests"
_START_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Served:
    """The running proxy."""

    url: str
    admin: httpx.AsyncClient

    async def fleet(self) -> list[dict[str, Any]]:
        answer = await self.admin.get("/admin/fleet")
        answer.raise_for_status()
        rows: list[dict[str, Any]] = answer.json()["replicas"]
        return rows

    async def ledger(self) -> dict[str, int]:
        """Everything that the router still holds reserved, summed over replicas."""
        rows = await self.fleet()
        names = ("in_flight_requests", "in_flight_tokens", "queued_prefill_tokens")
        return {name: sum(row[name] for row in rows) for name in names}

    async def terms(self, request_id: str) -> dict[str, float]:
        """What the first candidate of the last decision for a request was made of."""
        answer = await self.admin.get(f"/admin/decisions/{request_id}")
        answer.raise_for_status()
        terms: dict[str, float] = answer.json()["decisions"][-1]["candidates"][0]["terms"]
        return terms

    async def samples(self) -> list[dict[str, Any]]:
        answer = await self.admin.get("/admin/samples")
        answer.raise_for_status()
        rows: list[dict[str, Any]] = answer.json()["samples"]
        return rows


@asynccontextmanager
async def served(
    replicas: Mapping[str, str],
    *,
    engine: EngineName = "llamacpp",
    policy: str = "gorgo",
    request_usage: bool = False,
    probe_interval_s: float = 30.0,
    limits: LimitsConfig | None = None,
    overload: OverloadConfig | None = None,
) -> AsyncIterator[Served]:
    """A proxy before `replicas` (name to URL), all in one region, on free ports of loopback."""
    stop = asyncio.Event()
    started: asyncio.Future[ServerAddresses] = asyncio.get_running_loop().create_future()
    config = Config(
        proxy=ProxyConfig(
            region="here",
            policy=policy,
            bind="127.0.0.1:0",
            admin_bind="127.0.0.1:0",
            probe_interval_s=probe_interval_s,
        ),
        regions=(RegionConfig(name="here"),),
        replicas=tuple(
            ReplicaConfig(name=name, region="here", url=url, engine=engine, request_usage=request_usage)
            for name, url in replicas.items()
        ),
        limits=limits or LimitsConfig(shutdown_grace_s=2.0),
        overload=overload or OverloadConfig(),
    )
    running = asyncio.create_task(
        serve(
            config,
            ProcessOptions(policy=make_policy(policy), admin_token=_TOKEN, environ={}, key=1, seed=1),
            ready=started.set_result,
            shutdown=stop,
        )
    )
    try:
        # One that fails to start never gets ready.
        running.add_done_callback(lambda _: started.cancel())
        addresses = await asyncio.wait_for(started, _START_TIMEOUT_S)
        headers = {"authorization": f"Bearer {_TOKEN}"}
        async with httpx.AsyncClient(base_url=addresses.admin_url, headers=headers) as admin:
            yield Served(url=addresses.data_url, admin=admin)
    finally:
        stop.set()
        await running


async def eventually(holds: Callable[[], Any], *, within_s: float = 5.0) -> None:
    """Asks a process of its own, which has no event to wait for, until `holds` or the time is over."""
    deadline = asyncio.get_running_loop().time() + within_s
    while not await asyncio.to_thread(holds):
        assert asyncio.get_running_loop().time() < deadline, f"not within {within_s} s"
        await asyncio.sleep(0.01)


async def eventually_so(tells: Callable[[], Awaitable[str]], *expected: str, within_s: float = 10.0) -> None:
    """Asks until the answer is one of those expected."""
    deadline = asyncio.get_running_loop().time() + within_s
    while (told := await tells()) not in expected:
        assert asyncio.get_running_loop().time() < deadline, f"{told} after {within_s} s, not {' or '.join(expected)}"
        await asyncio.sleep(0.02)
