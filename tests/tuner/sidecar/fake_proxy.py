"""The admin listener of a proxy in a few lines, in virtual time, and a sidecar beside it that can be killed."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from tuner.campaign.options import CampaignOptions
from tuner.history import History
from tuner.proxy_client import ProxyClient
from tuner.sidecar.bootstrap import Bootstrap, SidecarOptions
from tuner.sidecar.loop import Sidecar
from tuner.sidecar.metrics import TunerMetrics
from tuner.sidecar.progress import Reporter

DEFAULTS = {"w_rtt": 0.5, "w_queue": 0.1}
PAPER = CampaignOptions(mode="paper", window=8, hop=4, warm_up_s=0.0)


class FakeProxy:
    """Knows weights, versions, freeze and a ring of samples; `down` cuts the network, `deaf` loses answers to puts."""

    def __init__(self, *, stored: int = 10_000, page: int = 1000) -> None:
        self.stored, self.page = stored, page
        self.down = self.deaf = False
        self.broken: int | None = None
        self.frozen: dict[str, str] | None
        self.boots = 0
        self.boot_prefix = "boot"
        self.puts: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self.restart()

    def restart(self) -> None:
        self.boots += 1
        self.boot_id, self.version, self.seq = f"{self.boot_prefix}-{self.boots:03}", 1, 0
        self.policy, self.weights, self.frozen = "gorgo", dict(DEFAULTS), None
        self.history: list[dict[str, Any]] = [{"source": "configuration", "by": None}]
        self.ring: deque[dict[str, Any]] = deque(maxlen=self.stored)

    def serve(self, count: int, ttft_ms: float = 400.0) -> None:
        """So many requests come and are done."""
        for _ in range(count):
            self.seq += 1
            row = {"seq": self.seq, "finished_s": 100.0 + self.seq, "e2e_s": 1.0, "itl_ms_p95": 10.0, "status": 200}
            self.ring.append(row | {"replica": "a", "weights_version": self.version, "ttft_ms": ttft_ms + self.seq % 7})

    def set(self, weights: Mapping[str, float], *, by: str, source: str = "admin") -> None:
        self.weights, self.version = {**self.weights, **weights}, self.version + 1
        self.history.append({"source": source, "by": by})

    def handle(self, request: httpx.Request) -> httpx.Response:
        if self.down:
            raise httpx.ConnectError("connection refused")
        if self.broken is not None:
            return httpx.Response(self.broken, json={"error": {"message": "out of order"}})
        answer = self._answer(request)
        if self.deaf and request.method == "PUT":
            raise httpx.ReadTimeout("no answer")
        return answer

    def _answer(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.calls.append(f"{request.method} {path}")
        if path == "/admin/samples":
            return httpx.Response(200, json=self._samples(int(request.url.params["after"])))
        if request.method == "PUT" and (refused := self._put(json.loads(request.content))):
            return refused
        if path == "/admin/freeze":
            body = json.loads(request.content)
            self.set(body.get("weights") or {}, by=body["by"], source="freeze")
            self.frozen = {"reason": body["reason"]}
        shown = {"policy": self.policy, "version": self.version, "weights": self.weights, "frozen": self.frozen}
        return httpx.Response(200, json=shown | ({} if path == "/admin/policy" else {"history": self.history}))

    def _put(self, body: dict[str, Any]) -> httpx.Response | None:
        if self.frozen is not None or body["expected_version"] != self.version:
            return httpx.Response(409, json={"error": {"message": "frozen" if self.frozen else "version conflict"}})
        self.set(body["weights"], by=body["by"])
        self.puts.append(body | {"boot": self.boot_id, "version": self.version})
        return None

    def _samples(self, after: int) -> dict[str, Any]:
        rows = [row for row in self.ring if row["seq"] > after][: self.page]
        first = self.seq + 1 - len(self.ring)
        shown = {"boot_id": self.boot_id, "first_seq": first, "last_seq": self.seq, "samples": rows}
        return shown | {"now_s": 100.0 + self.seq}


class Beside:
    """Sidecars beside one proxy, one after the other, on one database and one clock."""

    def __init__(self, proxy: FakeProxy, path: Path, campaign: CampaignOptions = PAPER, **options: Any) -> None:
        self.proxy, self.now = proxy, 1000.0
        self.said: list[str] = []
        self.complaints: list[str] = []
        self.options = SidecarOptions(
            url="http://proxy:9090",
            token="t",
            database=f"sqlite:///{path}/history.sqlite3",
            campaign=campaign,
            **{"seed": 1} | options,
        )
        self.history = History(self.options.database)
        self.sidecar: Sidecar

    async def start(self) -> Sidecar:
        """Another process; the one before was killed, or has ended."""
        client = ProxyClient(self.options.url, "t", transport=httpx.MockTransport(self.proxy.handle))
        found = await client.weights()
        reporter = Reporter(self.said.append, self.complaints.append)
        history = None if self.options.dry_run else self.history
        opening = Bootstrap(self.options, client, found, history, reporter, lambda: self.now)
        self.metrics = TunerMetrics()
        self.sidecar = opening.sidecar(self.metrics)
        await self.sidecar.start()
        return self.sidecar

    async def step(self, requests: int = 0, *, ttft_ms: float = 400.0, seconds: float = 1.0) -> float:
        """Traffic, then one look."""
        self.proxy.serve(requests, ttft_ms)
        self.now += seconds
        return await self.sidecar.step()

    async def until_generation(self, number: int, *, ttft_ms: float = 400.0) -> None:
        for _ in range(400):
            if self.sidecar.campaign.ledger.number >= number:
                return
            await self.step(4, ttft_ms=ttft_ms)
        raise AssertionError(f"no generation {number}; {self.said[-3:]} {self.complaints[-3:]}")

    @property
    def numbers(self) -> list[int]:
        return [row.number for row in self.history.generations()]

    @property
    def events(self) -> list[str]:
        return [event.kind for event in self.history.events()]
