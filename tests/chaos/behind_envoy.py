"""The fleet of a run in which Envoy and `gorgo picker` stand in the place of the proxy.

Envoy's own list has both doors of each gate from the start: it is printed once, as an operator does, and which door is
in use is the picker's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import yaml

from gorgo.config.load import parse_config
from gorgo.lab.demo.run import Processes
from gorgo.picker.envoy.config import envoy_config
from tests.chaos.fleet import SERVE, START_S, Fleet, free_ports
from tests.chaos.gate import HOST
from tests.picker.envoy.envoy import PROGRAM

ENVOY = "envoy"
_POLL_S = 0.05


class EnvoyFleet(Fleet):
    """As `Fleet`; the process `SERVE` is the picker."""

    def __init__(self, folder: Path, processes: Processes, seed: int, limits: Mapping[str, float]) -> None:
        super().__init__(folder, processes, seed, limits)
        self._picker_port, self._envoy_port = free_ports(2)

    async def start_proxy(self) -> None:
        words = ["picker", "--config", str(self.config), "--state", str(self.state_file), "--seed", str(self.seed)]
        ready = await self._start(SERVE, words, r"listening on (\S+) \(admin (http://[^\s)]+)\)")
        self.url, self.admin_url = f"http://{HOST}:{self._envoy_port}", ready[2]
        file = self.folder / "envoy.yaml"
        file.write_text(yaml.safe_dump(self._envoy()))
        command = [str(PROGRAM), "-c", str(file), "--concurrency", "1", "--disable-hot-restart", "-l", "warning"]
        self.names.append(ENVOY)
        self._processes.start_command(ENVOY, command)
        async with httpx.AsyncClient(base_url=self.url, trust_env=False) as client, asyncio.timeout(START_S):
            while not await _answers(client):
                await asyncio.sleep(_POLL_S)

    def _envoy(self) -> dict[str, Any]:
        document = self._document()
        for row in tuple(document["replicas"]):
            other = {"name": f"{row['name']}-moved", "url": f"http://{HOST}:{self.gates[row['name']].ports[1]}"}
            document["replicas"].append({**row, **other, "models": list(row["models"])})
        return envoy_config(parse_config(yaml.safe_dump(document).encode()))

    def _document(self) -> dict[str, Any]:
        document = super()._document()
        document["proxy"]["bind"] = f"{HOST}:{self._envoy_port}"
        document["picker"] = {"bind": f"{HOST}:{self._picker_port}"}
        return document


async def _answers(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/ready")).status_code == 200
    except httpx.TransportError:
        return False
