"""The processes that chaos is about: engines behind their gates, the sidecar, and the proxy or Envoy with a picker."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from gorgo.config.load import parse_config
from gorgo.lab.demo import Processes
from gorgo.live.state import INTERNAL_VARIABLE
from gorgo.picker.envoy import envoy_config
from tests.chaos.gate import HOST, Gate
from tests.chaos.questions import MODEL
from tests.picker.envoy.envoy import PROGRAM
from tests.ports import free_ports

# --- The processes that chaos is about: three engines behind their gates, the proxy, the sidecar.
#
# Owns starting and killing them, and the one regions.yaml that they share. What is done to them and when is `faults`.


#: Region of each replica and its mean round trip in ms from the proxy, which is in the first. A quarter of those of the
#: demo, so that all three have requests at a load that leaves the cores to those who are tested.
REGIONS = {"ashburn-0": ("us-ashburn", 2), "frankfurt-0": ("eu-frankfurt", 24), "seoul-0": ("ap-seoul", 45)}
REPLICAS = tuple(REGIONS)
TOKEN = "token-of-the-chaos"
#: For a process to say that it listens; the cores are shared.
START_S = 120.0
_RELOADED, _POLL_S = re.compile(r'"event": ?"config_re(?:loaded|fused)"'), 0.05
SERVE = "serve"
#: What is set other than by default, so that minutes show what hours would; the rest is as an operator has it.
PROXY = {"policy": "gorgo-ms", "bind": f"{HOST}:0", "admin_bind": f"{HOST}:0"}
INTERVALS = {"probe_interval_s": 1.0, "scrape_interval_s": 1.0}
LIMITS = {
    # As short as a machine with other work on it allows: a process that gets no processor for so long is no fault.
    "connect_timeout_s": 3.0,
    "first_token_timeout_s": 6.0,
    "response_timeout_s": 8.0,
    "stream_idle_timeout_s": 4.0,
    "request_timeout_s": 40.0,
    # Full within the warm-up, so that memory can be judged after it, and evictions happen.
    "prefix_index_blocks": 2000,
    "shutdown_grace_s": 5.0,
}
OVERLOAD = {"slow_start_s": 3.0}


@dataclass(slots=True)
class Edits:
    """How regions.yaml differs from the one of the start."""

    left_out: set[str] = field(default_factory=set)
    draining: set[str] = field(default_factory=set)
    #: Replicas that are reached by their gate's second door.
    moved: set[str] = field(default_factory=set)
    #: Replicas whose url ends in `/v1`.
    wrong_path: set[str] = field(default_factory=set)
    limits: dict[str, float] = field(default_factory=dict)
    #: A file that must be refused.
    broken: bool = False


class Fleet:
    """Everything that runs, by its name."""

    #: Options of the proxy beside those of every run.
    options: tuple[str, ...] = ()

    def __init__(self, folder: Path, processes: Processes, seed: int, limits: Mapping[str, float]) -> None:
        self.folder = folder
        self.seed = seed
        self.limits = limits
        self.edits = Edits()
        self.gates: dict[str, Gate] = {}
        self.url = self.admin_url = ""
        self.database = folder / "history.sqlite3"
        self.state_file = folder / "state.json"
        #: Every process there was, in order.
        self.names: list[str] = []
        self._processes = processes
        self._engine_ports = dict(zip(REPLICAS, free_ports(len(REPLICAS)), strict=True))
        self._starts: dict[str, int] = {}
        self._latest: dict[str, str] = {}

    # -- processes

    async def start_engine(self, replica: str) -> None:
        """On its port; returns when it listens."""
        port = str(self._engine_ports[replica])
        words = ["engine", "--replica", replica, "--config", str(self.folder / "engines.yaml"), "--port", port]
        await self._start(replica, words, r"listening on")

    async def start_proxy(self) -> None:
        words = ["serve", "--config", str(self.config), "--state", str(self.state_file), "--seed", str(self.seed)]
        words += self.options
        ready = await self._start(SERVE, words, r"listening on (http://\S+) \(admin (http://[^\s)]+)\)")
        self.url, self.admin_url = ready[1], ready[2]

    async def start_sidecar(self) -> None:
        """In paper mode with tiny windows, which writes a generation every few seconds."""
        words = ["tune", "--url", self.admin_url, "--database", f"sqlite:///{self.database}", "--seed", str(self.seed)]
        settings = self.folder / "tune.yaml"
        settings.write_text("{window: 12, hop: 6, warm_up_s: 0, poll_s: 0.2}\n")
        words += ["--mode", "paper", "--settings", str(settings)]
        await self._start("tune", [*words, "--max-generations", "100000"], r"campaign \d+")

    def kill(self, name: str) -> None:
        """SIGKILL, and wait for it to be gone."""
        process = self._process(name)
        process.kill()
        process.wait()

    def pid(self, name: str) -> int:
        return self._process(name).pid

    def serving_pids(self) -> list[int]:
        """The processes of the proxy that serve."""
        return [self.pid(SERVE)]

    def alive(self, name: str) -> bool:
        return self._process(name).poll() is None

    def said(self, name: str) -> str:
        """All that a process (by its name in `names`) has said."""
        return (self.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")

    async def _start(self, name: str, words: list[str], pattern: str) -> Any:
        count = self._starts[name] = self._starts.get(name, 0) + 1
        full = self._latest[name] = f"{name}-{count}"
        self.names.append(full)
        self._processes.start(full, words)
        return await asyncio.to_thread(self._processes.wait_for_line, full, pattern, timeout_s=START_S)

    def _process(self, name: str) -> subprocess.Popen[bytes]:
        return self._processes._running[self._latest[name]]

    # -- configuration

    @property
    def config(self) -> Path:
        return self.folder / "regions.yaml"

    def engine_url(self, replica: str) -> str:
        """Past the gate, for whoever breaks it."""
        return f"http://{HOST}:{self._engine_ports[replica]}"

    def write_config(self) -> None:
        """As the edits have it, in one step."""
        text = "replicas: [" if self.edits.broken else yaml.safe_dump(self._document(), sort_keys=False)
        _replace(self.config, text)

    async def reload(self) -> None:
        """Write it and have the proxy read it at once; returns when the proxy has followed or refused it."""
        before = self._reloads()
        self.write_config()
        os.kill(self.pid(SERVE), signal.SIGHUP)
        async with asyncio.timeout(START_S):
            while self._reloads() == before:
                await asyncio.sleep(_POLL_S)

    def _reloads(self) -> int:
        """Files of which the proxy has said what became of them."""
        return len(_RELOADED.findall(self.said(self._latest[SERVE])))

    def write_engine_config(self) -> None:
        urls = {name: self.engine_url(name) for name in REPLICAS}
        _replace(self.folder / "engines.yaml", yaml.safe_dump(_document(urls, REPLICAS, self.limits), sort_keys=False))

    def _document(self) -> dict[str, Any]:
        edits = self.edits
        urls = {name: f"http://{HOST}:{gate.ports[name in edits.moved]}" for name, gate in self.gates.items()}
        names = [name for name in REPLICAS if name not in edits.left_out]
        document = _document(urls, names, {**self.limits, **edits.limits})
        for row in document["replicas"]:
            row["draining"] = row["name"] in edits.draining
            row["url"] += "/v1" if row["name"] in edits.wrong_path else ""
        return document

    async def open_gates(self) -> None:
        for name in REPLICAS:
            self.gates[name] = Gate(name, self._engine_ports[name])
            await self.gates[name].open()


def _document(urls: Mapping[str, str], names: Iterable[str], limits: Mapping[str, float]) -> dict[str, Any]:
    regions = dict(REGIONS.values())
    rows = [{"name": name, "region": REGIONS[name][0], "url": urls[name], "models": [MODEL]} for name in names]
    return {
        "proxy": {"region": REGIONS[REPLICAS[0]][0], **PROXY, **INTERVALS},
        "regions": [{"name": region} for region in regions],
        "replicas": rows,
        "limits": dict(limits),
        "overload": dict(OVERLOAD),
        "simulation": {"rtt_ms": regions, "seed": 0, "profile": "1xH100-Llama-3.1-8B"},
    }


def _replace(path: Path, text: str) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)


class PlainFleet(Fleet):
    """With the HTTP of stock libraries."""

    options = ("--plain",)


class WorkersFleet(Fleet):
    """With two processes as one proxy."""

    options = ("--processes", "2")

    def serving_pids(self) -> list[int]:
        parent = self.pid(SERVE)
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text()
        return [parent, *map(int, children.split())]


@asynccontextmanager
async def running_fleet(
    folder: Path, seed: int, limits: Mapping[str, float], kind: type[Fleet] = Fleet
) -> AsyncIterator[Fleet]:
    """Engines, gates and the proxy, without a sidecar yet; everything is stopped whatever happens."""
    environ = {**os.environ, "GORGO_ADMIN_TOKEN": TOKEN, INTERNAL_VARIABLE: "1", "PYTHONUNBUFFERED": "1"}
    with Processes(folder, environ) as processes:
        fleet = kind(folder, processes, seed, limits)
        fleet.write_engine_config()
        await asyncio.gather(*(fleet.start_engine(name) for name in REPLICAS))
        await fleet.open_gates()
        try:
            fleet.write_config()
            await fleet.start_proxy()
            yield fleet
        finally:
            for gate in fleet.gates.values():
                await gate.close()


# --- The fleet of a run in which Envoy and `gorgo picker` stand in the place of the proxy.
#
# Envoy's own list has both doors of each gate from the start: it is printed once, as an operator does, and which door
# is in use is the picker's business.


ENVOY = "envoy"
_ENVOY_POLL_S = 0.05


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
                await asyncio.sleep(_ENVOY_POLL_S)

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
