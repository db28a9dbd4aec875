"""A picker in this process, scripted replicas behind one real Envoy, and clients before it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx

from gorgo.config.fleet import ReplicaConfig
from gorgo.config.model import (
    ClientRuleConfig,
    ClientsConfig,
    Config,
    LimitsConfig,
    OverloadConfig,
    PickerConfig,
    PickerTlsConfig,
    RegionConfig,
)
from gorgo.live import process
from gorgo.live.build import build_live
from gorgo.live.listener.sockets import ServerAddresses
from gorgo.live.process import ProcessOptions
from gorgo.live.state import LiveState
from gorgo.picker import server
from gorgo.picker.state import PickerState
from gorgo.policies.registry import make_policy
from tests.picker.envoy.envoy import Fronts, envoy
from tests.ports import free_port
from tests.proxy.conftest import QUIET, system_tls, until
from tests.proxy.fakes import FakeReplica, answer, running

CHAT = "/v1/chat/completions"
KEYS = {"main": "key-of-the-main-client", "small": "key-of-the-small-client", "plain": "key-of-no-rule"}


@dataclass
class Rig:
    """What runs, and the client of one front at a time."""

    state: PickerState
    replicas: list[FakeReplica]
    fronts: Fronts
    #: Stops the picker, whose end is that of the task.
    shutdown: asyncio.Event
    task: asyncio.Task[None]

    def client(self, front: str = "own", **options: Any) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {KEYS[options.pop('key', 'main')]}"}
        return httpx.AsyncClient(base_url=getattr(self.fronts, front), timeout=20, headers=headers, **options)

    def script(self, *scripts: Any) -> None:
        """Every replica answers so from now on."""
        for replica in self.replicas:
            replica.scripts = list(scripts)
            replica.seen.clear()
            replica.release.clear()
            replica.arrived.clear()
            replica.dropped.clear()

    @property
    def samples(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.state.routing.router.samples.after(0, 10_000)["samples"]
        return found

    async def idle(self) -> None:
        """Wait until every exchange has ended and has its entry of the log, and check that nothing is reserved."""
        state = self.state
        await until(lambda: not (state.routing.router.in_flight or state.calls or len(state.open_exchanges)))
        for view in self.state.routing.router.view.snapshots(now=self.state.routing.clock()):
            assert (view.in_flight_requests, view.in_flight_tokens, view.queued_prefill_tokens) == (0, 0, 0)
        self.state.routing.router.check()


def config_for(replicas: list[FakeReplica], keys_file: Path) -> Config:
    lines = (f"{name}:{hashlib.sha256(key.encode()).hexdigest()}" for name, key in KEYS.items())
    keys_file.write_text("\n".join(lines) + "\n")
    return Config(
        proxy=replace(QUIET, bind=f"127.0.0.1:{free_port()}"),
        regions=(RegionConfig(name="here"),),
        replicas=tuple(
            ReplicaConfig(name=f"r{n}", region="here", url=fake.url, engine="sglang") for n, fake in enumerate(replicas)
        ),
        picker=PickerConfig(bind="127.0.0.1:0"),
        # A minute's quota of six allows one request at a time.
        clients=ClientsConfig(
            keys_file=str(keys_file),
            rules=(
                ClientRuleConfig(name="small", requests_per_minute=6.0),
                ClientRuleConfig(name="main", estimates=True),
            ),
        ),
        limits=LimitsConfig(shutdown_grace_s=0.5),
        overload=OverloadConfig(no_replica_wait_s=0.0),
    )


@asynccontextmanager
async def rig(folder: Path, *, with_keys: bool = True, tls: PickerTlsConfig | None = None) -> AsyncIterator[Rig]:
    """Run picker, replicas and Envoy until the end of the block, with `tls` between Envoy and the picker."""
    loop = asyncio.get_running_loop()
    states: list[PickerState] = []
    bound: asyncio.Future[ServerAddresses] = loop.create_future()

    def build(*args: Any, **kwargs: Any) -> LiveState:
        return build_live(*args, tls=system_tls(), **kwargs)

    def catch(*args: Any) -> PickerState:
        states.append(PickerState(*args))
        return states[-1]

    async with AsyncExitStack() as stack:
        replicas = [await stack.enter_async_context(running(answer(200))) for _ in range(2)]
        config = config_for(replicas, folder / "keys")
        if not with_keys:
            config = replace(config, clients=ClientsConfig())
        if tls is not None:
            config = replace(config, picker=replace(config.picker, tls=tls))
        options = ProcessOptions(policy=make_policy("round-robin"), environ={}, key=7, seed=7)
        shutdown = asyncio.Event()
        stack.enter_context(patch.object(process, "build_live", build))
        stack.enter_context(patch.object(server, "PickerState", catch))
        task = asyncio.create_task(server.serve(config, options, ready=bound.set_result, shutdown=shutdown))
        await asyncio.wait((task, bound), return_when=asyncio.FIRST_COMPLETED, timeout=20)
        if task.done():
            task.result()
        port = bound.result().data[1]
        config = replace(config, picker=replace(config.picker, bind=f"127.0.0.1:{port}"))
        try:
            async with envoy(config, folder) as fronts:
                yield Rig(states[0], replicas, fronts, shutdown, task)
        finally:
            shutdown.set()
            await asyncio.wait_for(task, 20)
