"""A sidecar beside several proxies in virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from tests.tuner.sidecar.fake_proxy import PAPER, FakeProxy
from tuner.campaign.options import CampaignOptions
from tuner.history import History
from tuner.leader import Leadership
from tuner.proxy_client import ProxyClient
from tuner.sidecar.bootstrap import Bootstrap, SidecarOptions
from tuner.sidecar.group import ProxyGroup
from tuner.sidecar.loop import Sidecar
from tuner.sidecar.metrics import TunerMetrics
from tuner.sidecar.progress import Reporter

NAMES = ("http://a", "http://b", "http://c")


def fake_proxies() -> dict[str, FakeProxy]:
    """Return proxies whose runs have names of their own."""
    proxies = {}
    for name in NAMES:
        proxies[name] = proxy = FakeProxy()
        proxy.boot_prefix = name
        proxy.restart()
    return proxies


class BesideGroup:
    """Sidecars beside one group, one after the other, on one database and one clock."""

    def __init__(self, path: Path, campaign: CampaignOptions = PAPER, **options: Any) -> None:
        self.proxies, self.now = fake_proxies(), 1000.0
        self.said: list[str] = []
        self.complaints: list[str] = []
        self.options = SidecarOptions(
            url=NAMES[0],
            further_urls=NAMES[1:],
            token="t",
            database=f"sqlite:///{path}/history.sqlite3",
            campaign=campaign,
            **{"seed": 1} | options,
        )
        self.history = History(self.options.database)
        self.leadership: Leadership | None = None
        self.sidecar: Sidecar
        self.group: ProxyGroup

    @property
    def a(self) -> FakeProxy:
        return self.proxies[NAMES[0]]

    @property
    def b(self) -> FakeProxy:
        return self.proxies[NAMES[1]]

    async def start(self) -> Sidecar:
        """Start another process; the one before was killed, or has ended."""
        clients = [ProxyClient(name, "t", transport=self.transport(name)) for name in self.proxies]
        self.group = ProxyGroup(clients, clock=lambda: self.now)
        found = await self.group.weights()
        await self.group.read_new()
        reporter = Reporter(self.said.append, self.complaints.append)
        history = None if self.options.dry_run else self.history
        opened = Bootstrap(self.options, self.group, found, history, reporter, lambda: self.now, self.leadership)
        self.metrics = TunerMetrics()
        self.sidecar = opened.sidecar(self.metrics)
        await self.sidecar.start()
        return self.sidecar

    def transport(self, name: str) -> httpx.MockTransport:
        """Return the network between this process and a proxy."""
        return httpx.MockTransport(self.proxies[name].handle)

    async def step(self, requests: int = 0, *, ttft_ms: float = 400.0, seconds: float = 1.0) -> float:
        """Serve requests at each proxy, then poll once."""
        for proxy in self.proxies.values():
            proxy.serve(requests, ttft_ms)
        self.now += seconds
        return await self.sidecar.step()

    async def until_generation(self, number: int) -> None:
        for _ in range(400):
            if self.sidecar.campaign.ledger.number >= number:
                return
            await self.step(2)
        raise AssertionError(f"no generation {number}; {self.said[-3:]} {self.complaints[-3:]}")

    @property
    def weights(self) -> list[dict[str, float]]:
        """Return the different weight sets in force."""
        sets = [dict(proxy.weights) for proxy in self.proxies.values()]
        return [one for place, one in enumerate(sets) if one not in sets[:place]]

    @property
    def numbers(self) -> list[int]:
        return [row.number for row in self.history.generations()]

    @property
    def events(self) -> list[str]:
        return [event.kind for event in self.history.events()]
