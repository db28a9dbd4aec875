"""A regions.yaml that tests rewrite, and a proxy that follows it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gorgo.config.load import parse_config
from gorgo.live.reload.file_watch import ConfigFile, Found
from tests.proxy.conftest import Running, Start
from tests.proxy.fakes import FakeReplica

#: As `QUIET` in conftest.
PROXY = {
    "region": "here",
    "policy": "round-robin",
    "bind": "127.0.0.1:0",
    "admin_bind": "127.0.0.1:0",
    "probe_interval_s": 1e6,
    "scrape_interval_s": 1e6,
}


def regions(
    replicas: Mapping[str, FakeReplica | Mapping[str, Any]],
    *,
    proxy: Mapping[str, Any] | None = None,
    limits: Mapping[str, Any] | None = None,
    **sections: Any,
) -> bytes:
    """The text of a file; JSON is YAML too. `sections` are put in as they are."""
    rows = [
        {"name": name, "region": "here", "engine": "sglang"}
        | ({"url": row.url} if isinstance(row, FakeReplica) else dict(row))
        for name, row in replicas.items()
    ]
    document: dict[str, Any] = {"proxy": PROXY | dict(proxy or {}), "regions": [{"name": "here"}], "replicas": rows}
    document["limits"] = {"shutdown_grace_s": 5.0} | dict(limits or {})
    return json.dumps(document | sections).encode()


class AwaitedFile(ConfigFile):
    """Tells when a reload is over: the proxy then asks for the next content."""

    def __init__(self, path: Path, text: bytes, *, poll_s: float) -> None:
        super().__init__(path, parse_config, text, poll_s=poll_s, settle_s=0.0)
        self._waits = asyncio.Event()
        #: Those that are over, refused ones included.
        self.reloads = -1

    async def changed(self) -> Found:
        self.reloads += 1
        self._waits.set()
        return await super().changed()

    async def reloaded(self, before: int) -> None:
        """Wait until one more than `before` is over."""
        async with asyncio.timeout(10):
            while self.reloads <= before:
                self._waits.clear()
                await self._waits.wait()


class Followed:
    """The file and the proxy."""

    def __init__(self, path: Path, file: AwaitedFile, fleet: Running) -> None:
        self.path = path
        self.file = file
        self.fleet = fleet
        self.state = fleet.state

    async def rewrite(self, text: bytes) -> None:
        """Write the file, ask for it, and wait until it was applied or refused."""
        before = self.file.reloads
        self.path.write_bytes(text)
        self.file.request_reload()
        await self.file.reloaded(before)

    def count(self, result: str) -> float:
        value = self.state.telemetry.metrics.registry.get_sample_value("gorgo_config_reloads_total", {"result": result})
        return value or 0.0

    def gauge(self, name: str) -> float | None:
        return self.state.telemetry.metrics.registry.get_sample_value(name)

    def view(self, name: str) -> Any:
        (found,) = [
            row for row in self.state.routing.router.view.snapshots(now=self.state.routing.clock()) if row.name == name
        ]
        return found


async def follow(
    start: Start, folder: Path, text: bytes, replicas: list[FakeReplica], *, poll_s: float = 1e6, **options: Any
) -> Followed:
    """Start a proxy on a file with `text`; it looks only when it is asked, unless `poll_s` says otherwise."""
    path = folder / "regions.yaml"
    path.write_bytes(text)
    file = AwaitedFile(path, text, poll_s=poll_s)
    return Followed(path, file, await start.proxy(parse_config(text), replicas, file=file, **options))
