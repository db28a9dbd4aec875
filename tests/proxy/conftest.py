"""A proxy in this process, in front of fake replicas, and an HTTP client for it."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop

from gorgo.config.fleet import ReplicaConfig
from gorgo.config.model import Config, LimitsConfig, ProxyConfig, RegionConfig
from gorgo.live import process
from gorgo.live.build import build_live
from gorgo.live.control.state_file import StateFile
from gorgo.live.listener.sockets import ServerAddresses
from gorgo.live.process import ProcessOptions
from gorgo.live.reload.file_watch import ConfigFile
from gorgo.live.state import LiveState
from gorgo.policies.registry import make_policy
from gorgo.proxy import server
from tests.proxy.authority import engine
from tests.proxy.fakes import FakeReplica, Script, running

TOKEN = "let-me-in"
#: No loop ticks within a test, except the first look at start.
QUIET = ProxyConfig(
    region="here",
    policy="round-robin",
    bind="127.0.0.1:0",
    admin_bind="127.0.0.1:0",
    probe_interval_s=1e6,
    scrape_interval_s=1e6,
)


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """A module that says `ON_BOTH_LOOPS` has each of its tests on asyncio's own loop and on uvloop."""
    loops: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
    if isinstance(item, pytest.Function) and getattr(item.module, "ON_BOTH_LOOPS", False):
        loops["uvloop"] = uvloop.new_event_loop
    return loops


@pytest.fixture(autouse=True)
def wrong_tokens_are_answered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests send many; `test_token_check` shows that they are late otherwise."""
    monkeypatch.setattr("gorgo.live.admin.calls.DELAY_S", 0.0)


@dataclass
class Running:
    """A proxy and what is around it."""

    client: httpx.AsyncClient
    admin: httpx.AsyncClient
    replicas: list[FakeReplica]
    state: LiveState
    addresses: ServerAddresses
    shutdown: asyncio.Event
    task: asyncio.Task[None]

    async def idle(self) -> None:
        """Wait until no exchange and no answer of a replica is open, and check that nothing is reserved any more."""
        await until(lambda: not self.state.exchanges and not self._open_sources())
        self.check()

    async def stop(self) -> None:
        """End it before the test does, as a first signal would."""
        self.shutdown.set()
        await asyncio.wait_for(asyncio.shield(self.task), 20)

    def check(self) -> None:
        assert self.state.routing.router.in_flight == 0
        assert (self.state.buffers.used_bytes, len(self.state.buffers)) == (0, 0)
        for view in self.state.routing.router.view.snapshots(now=self.state.routing.clock()):
            assert (view.in_flight_requests, view.in_flight_tokens, view.queued_prefill_tokens) == (0, 0, 0)
        assert not self._open_sources()

    def _open_sources(self) -> int:
        return sum(target.upstream.open_responses for target in self.state.replicas.targets.values())


async def until(condition: Callable[[], object], limit_s: float = 10.0) -> None:
    """Wait for something that happens in another task or across a socket; never for a time to pass."""
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.002)


@cache
def system_tls() -> ssl.SSLContext:
    """The system's authorities, read once: three contexts per proxy took longer than most tests."""
    return ssl.create_default_context()


def config_for(replicas: list[FakeReplica], proxy: ProxyConfig = QUIET, **limits: Any) -> Config:
    rows = tuple(
        ReplicaConfig(name=f"r{n}", region="here", url=fake.url, engine="sglang") for n, fake in enumerate(replicas)
    )
    defaults: dict[str, Any] = {"shutdown_grace_s": 5.0, **limits}
    return Config(proxy=proxy, regions=(RegionConfig(name="here"),), replicas=rows, limits=LimitsConfig(**defaults))


@asynccontextmanager
async def proxy_for(
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
    replicas: list[FakeReplica],
    *,
    token: str | None = TOKEN,
    environ: dict[str, str] | None = None,
    file: ConfigFile | None = None,
    state_file: StateFile | None = None,
    request_log: Path | None = None,
    outcome_log: Path | None = None,
    plain: bool = False,
) -> AsyncIterator[Running]:
    """`serve` as a task; its state is caught on the way so that a test can look at the ledger."""
    loop = asyncio.get_running_loop()
    bound: asyncio.Future[ServerAddresses] = loop.create_future()
    caught: list[LiveState] = []

    def catch(*args: Any, **kwargs: Any) -> LiveState:
        caught.append(build_live(*args, tls=system_tls(), **kwargs))
        return caught[-1]

    monkeypatch.setattr(process, "build_live", catch)
    shutdown = asyncio.Event()
    task = asyncio.create_task(
        server.serve(
            config,
            ProcessOptions(
                policy=make_policy(config.proxy.policy),
                admin_token=token,
                environ=environ or {},
                key=7,
                seed=7,
                file=file,
                state_file=state_file,
                request_log=request_log,
                outcome_log=outcome_log,
                plain=plain,
            ),
            ready=bound.set_result,
            shutdown=shutdown,
        )
    )
    await asyncio.wait((task, bound), return_when=asyncio.FIRST_COMPLETED, timeout=20)
    if task.done():
        task.result()
    addresses = bound.result()
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    try:
        async with (
            httpx.AsyncClient(base_url=addresses.data_url, timeout=20, verify=system_tls()) as client,
            httpx.AsyncClient(base_url=addresses.admin_url, timeout=20, headers=headers, verify=system_tls()) as admin,
        ):
            yield Running(client, admin, replicas, caught[0], addresses, shutdown, task)
    finally:
        shutdown.set()
        await asyncio.wait_for(task, 20)


class Start:
    """Starts proxies for one test and stops them after it."""

    def __init__(self, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch, *, plain: bool = False) -> None:
        self._stack = stack
        self._monkeypatch = monkeypatch
        self.plain = plain

    async def replica(self, *scripts: Script) -> FakeReplica:
        return await self._stack.enter_async_context(running(*scripts))

    async def tls_engine(self, pair: tuple[str, str], ca: str | None) -> str:
        """Return the URL of an engine behind TLS that outlives each proxy started after it.

        asyncio's server loses the transport of a connection that it accepted in the turn in which it was closed, so
        no proxy may still connect when the engine ends.
        """
        return await self._stack.enter_async_context(engine(pair, ca))

    async def proxy(self, config: Config, replicas: list[FakeReplica], **options: Any) -> Running:
        options = {"plain": self.plain, **options}
        return await self._stack.enter_async_context(proxy_for(config, self._monkeypatch, replicas, **options))

    async def fleet(self, *scripts: list[Script], proxy: ProxyConfig = QUIET, **limits: Any) -> Running:
        """One replica per list of scripts, and a proxy that asks them in order."""
        replicas = [await self.replica(*script) for script in scripts]
        return await self.proxy(config_for(replicas, proxy, **limits), replicas)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A module that says `IN_BOTH_FORMS` has its tests on the own HTTP and on that of `--plain`.

    Those of its `OWN_ALONE` have the first alone, and say why.
    """
    if "start" in metafunc.fixturenames and getattr(metafunc.module, "IN_BOTH_FORMS", False):
        alone = [name for names in getattr(metafunc.module, "OWN_ALONE", {}).values() for name in names]
        assert all(hasattr(metafunc.module, name) for name in alone), "each is a test of the module"
        if metafunc.function.__name__ not in alone:
            metafunc.parametrize("start", [False, True], ids=["own", "plain"], indirect=True)


@pytest.fixture
async def start(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> AsyncIterator[Start]:
    is_plain = getattr(request, "param", False)
    if is_plain and isinstance(asyncio.get_running_loop(), uvloop.Loop):
        pytest.skip("--plain runs on asyncio's loop")
    async with AsyncExitStack() as stack:
        yield Start(stack, monkeypatch, plain=is_plain)


def with_replica(config: Config, index: int, **changes: Any) -> Config:
    """`config` with one replica changed."""
    rows = list(config.replicas)
    rows[index] = replace(rows[index], **changes)
    return replace(config, replicas=tuple(rows))
