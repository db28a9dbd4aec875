"""Engines and routers as processes, and an open loop of clients over them."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import yaml

from gorgo.lab.demo import Processes
from gorgo.lab.replay import BodiesAhead
from gorgo.lab.replay_client import ReplayClient, ReplayOptions, ReplayRecord, open_http
from gorgo.lab.traces import TraceRequest, scheduled_s
from gorgo.live.state import INTERNAL_VARIABLE
from tests.live.peer_store.server import ENVIRON, KEY_VARIABLE
from tests.overload.fleet import PROBE_INTERVAL_S, ROOT_CONFIG

# --- Engines and routers as processes: each router has the same fleet, and one store where there is one.


TOKEN = secrets.token_hex(16)
#: A router with records of another version: as the next one might have them.
OTHER_FORMAT = "import gorgo.core.peers.records as records; records.FORMAT += 1"
#: Routers of hosts whose clocks are five seconds off: of the whole process, before a module takes the function.
CLOCK_AHEAD, CLOCK_BEHIND = (
    f"import time as clock; real = clock.time; clock.time = lambda: real() {off_s:+.1f}" for off_s in (5.0, -5.0)
)
_SERVE = "\nfrom gorgo.cli import main; main()"
#: For a process to say that it listens; the cores are shared.
START_S = 180.0
_LISTENING = r"gorgo serve listening on (http://\S+) \(admin (http://[^\s)]+)\)"


@dataclass
class Router:
    """One `gorgo serve`."""

    name: str
    url: str
    admin_url: str
    process: subprocess.Popen[bytes] = field(repr=False)

    async def status(self, http: httpx.AsyncClient, path: str = "/admin/check") -> Any:
        headers = {"authorization": f"Bearer {TOKEN}"}
        return (await http.get(f"{self.admin_url}{path}", headers=headers, timeout=20)).json()

    async def metric(self, http: httpx.AsyncClient, series: str) -> float:
        """Return a value of `/metrics`; 0 where there is none."""
        text = (await http.get(f"{self.url}/metrics", timeout=20)).text
        found = re.search(rf"^{re.escape(series)} (\S+)$", text, flags=re.MULTILINE)
        return float(found[1]) if found else 0.0

    def cpu_s(self) -> float:
        """Return the processor time that the process has used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def configuration(urls: Mapping[str, str], *, store: str | None, router: str = "r0") -> dict[str, Any]:
    """Return regions.yaml with free ports, short intervals and the addresses of engines and store."""
    config: dict[str, Any] = yaml.safe_load(ROOT_CONFIG.read_text(encoding="utf-8"))
    config["proxy"] |= {
        "bind": "127.0.0.1:0",
        "admin_bind": "127.0.0.1:0",
        "probe_interval_s": PROBE_INTERVAL_S,
        "scrape_interval_s": PROBE_INTERVAL_S,
    }
    for replica in config["replicas"]:
        replica["url"] = urls.get(replica["name"], replica["url"])
    if store is not None:
        config["shared"] = {"url": store, "group": "live", "key_env": KEY_VARIABLE, "router": router}
    return config


@contextmanager
def running(
    folder: Path,
    stores: Sequence[str | None],
    *,
    changed: Mapping[int, str] = MappingProxyType({}),
    options: Sequence[str] = (),
) -> Iterator[list[Router]]:
    """Start engines and a router per entry of `stores`, each with its way to the store; stop them all at the end.

    `changed` has code that some routers run before they serve, by number; `options` are those of all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    environ = {**os.environ, **ENVIRON, "GORGO_ADMIN_TOKEN": TOKEN, INTERNAL_VARIABLE: "1", "PYTHONUNBUFFERED": "1"}
    engines = folder / "engines.yaml"
    config = configuration({}, store=None)
    engines.write_text(yaml.safe_dump(config, sort_keys=False))
    with Processes(folder, environ) as processes:
        names = [replica["name"] for replica in config["replicas"]]
        for name in names:
            processes.start(name, ["engine", "--replica", name, "--config", str(engines), "--port", "0"])
        urls = {
            name: processes.wait_for_line(name, r"listening on (http://\S+)", timeout_s=START_S)[1] for name in names
        }
        routers = []
        for number, store in enumerate(stores):
            path = folder / f"router-{number}.yaml"
            path.write_text(yaml.safe_dump(configuration(urls, store=store, router=f"r{number}"), sort_keys=False))
            words = ["serve", "--config", str(path), "--seed", str(number), *options]
            if number in changed:
                processes.start_command(f"serve-{number}", [sys.executable, "-c", changed[number] + _SERVE, *words])
            else:
                processes.start(f"serve-{number}", words)
            # One after another: so many interpreters at once would starve each other.
            found = processes.wait_for_line(f"serve-{number}", _LISTENING, timeout_s=START_S)
            routers.append(Router(f"r{number}", found[1], found[2], processes._running[f"serve-{number}"]))
        yield routers


# --- An open loop of clients over several routers: each request at its time, to the router that the split has for it.


MODEL = "gorgo-sim"
#: Between starting and the first request, s.
LEAD_S = 0.2


async def drive(
    requests: Sequence[TraceRequest], routers: Sequence[Router], router_of: Callable[[int], int], *, time_scale: float
) -> list[ReplayRecord]:
    """Send all and return their records, in the order of the requests."""
    options = [ReplayOptions(trace=Path("slice"), url=router.url, model=MODEL) for router in routers]
    async with open_http(options[0]) as http:
        start_s = time.monotonic() + LEAD_S
        clients = [ReplayClient(http, one, clock=time.monotonic, start_s=start_s, run="peers") for one in options]
        bodies = BodiesAhead(requests, MODEL)
        sent: list[asyncio.Task[ReplayRecord]] = []
        while (item := bodies.next()) is not None:
            request, body = item
            due_s = scheduled_s(request, time_scale)
            while start_s + due_s - time.monotonic() > 0.003 and bodies.build_one():
                await asyncio.sleep(0)
            await asyncio.sleep(max(0.0, start_s + due_s - time.monotonic()))
            client = clients[router_of(len(sent))]
            sent.append(asyncio.create_task(client.send(request, body, due_s)))
        return list(await asyncio.gather(*sent))
