"""One soak from beginning to end: real processes, the load in this one, looks through the proxy's window in between.

Owns the order of things and every wait's bound. What is sent is `load`, what is demanded `verdict`.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import httpx
import yaml

from gorgo.lab.demo import Processes
from tests.bench.relay.measure import cpu_times, process_tree, resident_bytes
from tests.bench.relay.wire import MODEL
from tests.documents import ROOT
from tests.soak.ledgers import Ledgers, summed
from tests.soak.load import Load
from tests.soak.verdict import Soak, fds_allowed

#: For the proxy to write what it holds: it may be in the middle of a look at all its garbage.
LOOK_S_MAX = 20.0
#: For ledgers, tasks and open files to come back: idle connections to replicas are kept for 4 s.
BACK_S_MAX = 30.0
#: For slow streams to begin, through the slow start of new replicas, and to end when the engines have ended them.
STREAMS_S_MAX = 120.0
#: For the last short requests to end when no more are sent; a proxy that answers nothing must not hold the run.
SHORTS_S_MAX = 60.0
#: Between two looks at the proxy's memory from outside.
SAMPLE_S = 1.0
_POLL_S = 0.05
#: Folder of the windows of several processes, and what opens them.
WINDOWS = "windows"
SITE = Path(__file__).parent / "site"
#: SHA-256 of the clients' keys, in the folder of the run.
KEYS_FILE = "clients.keys"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much.

    Parameters
    ----------
    shorts, streams:
        Short requests that count, and slow streams that are open all the while.
    warm_up:
        Short requests before those, beside the same streams. They fill what is kept up to a bound: 10,000 samples,
        1,000 decisions and the prefix index, which takes 40,000. As many again, because the heap grows a little each
        time that its pages are exchanged, which is 10, 30 and 70 s after the start.
    connections:
        Short requests at a time.
    limit_s:
        Short requests that are not sent by then are not sent: the whole is ten minutes at most.
    leave:
        Slow streams whose clients go away in the end; the others end by themselves.
    processes:
        Of the proxy.
    """

    shorts: int = 100_000
    streams: int = 500
    warm_up: int = 100_000
    connections: int = 16
    limit_s: float = 450.0
    replicas: int = 3
    clients: int = 4
    leave: int = 100
    processes: int = 1


def soak(plan: Plan, folder: Path, *, tell: Callable[[str], None] = lambda _: None) -> Soak:
    """Run it. `tell` is told of each step. Raises `FleetError` if a process does not start, `TimeoutError` if a wait
    is over its bound.
    """
    keys = [secrets.token_hex(16) for _ in range(plan.clients)]
    environ = {**os.environ, "PYTHONUNBUFFERED": "1", "GORGO_ADMIN_TOKEN": secrets.token_hex(16)}
    if plan.processes > 1:
        (folder / WINDOWS).mkdir()
        environ |= {"PYTHONPATH": f"{SITE}{os.pathsep}{ROOT}", "GORGO_SOAK_WINDOWS": str(folder / WINDOWS)}
    entries = [f"client-{number}:{sha256(key.encode()).hexdigest()}" for number, key in enumerate(keys)]
    (folder / KEYS_FILE).write_text("\n".join(entries))
    with Processes(folder, environ) as processes:
        return asyncio.run(_Run(plan, folder, processes, keys, tell).run())


class _Run:
    def __init__(
        self, plan: Plan, folder: Path, processes: Processes, keys: list[str], tell: Callable[[str], None]
    ) -> None:
        self._plan = plan
        self._folder = folder
        self._processes = processes
        self._keys = keys
        self._tell = tell
        self._window = folder / "ledgers.json"
        self._token = processes._environ["GORGO_ADMIN_TOKEN"]
        self._admin = ""
        self._resident: list[int] = []

    async def run(self) -> Soak:
        plan = self._plan
        host, port = self._start()
        load = Load(host, port, self._keys)
        try:
            await self._until_served(f"http://{host}:{port}")
            fresh = await self._look()
            self._tell(f"{plan.streams} slow streams")
            async with asyncio.timeout(STREAMS_S_MAX):
                await load.open_streams(plan.streams)
            self._tell(f"{plan.warm_up} short requests to warm up")
            over = asyncio.get_running_loop().call_later(plan.limit_s, load.stop)
            warm_up_s = await self._shorts(load, plan.warm_up)
            warm = await self._look()
            self._tell(f"{plan.shorts} short requests")
            spent_s, _ = cpu_times(self._measured)
            wall_s = await self._shorts(load, plan.shorts)
            cpu_s = cpu_times(self._measured)[0] - spent_s
            streaming, end = load.streaming, await self._look()
            over.cancel()
            self._tell("the streams end")
            await self._end_streams(load)
        finally:
            load.close()
        after = await self._back(fresh)
        return Soak(
            fresh=fresh,
            warm=warm,
            end=end,
            after=after,
            replicas=plan.replicas * plan.processes,
            shorts=plan.shorts,
            unsent=load.unsent,
            streams=plan.streams,
            answered=load.answered,
            expected=plan.warm_up + plan.shorts - load.unsent + plan.streams - plan.leave,
            streaming=streaming,
            streamed_tokens=load.streamed,
            wall_s=wall_s,
            warm_up_s=warm_up_s,
            cpu_s=cpu_s,
            exit_code=self._stop(),
            problems=dict(load.problems),
            resident=tuple(self._resident),
        )

    def _start(self) -> tuple[str, int]:
        urls = {}
        for number in range(self._plan.replicas):
            name = f"engine-{number}"
            self._processes.start_command(name, [sys.executable, "-m", "tests.soak.engine"])
            urls[name] = self._processes.wait_for_line(name, r"listening on (http://\S+)")[1]
        config = self._folder / "regions.yaml"
        config.write_text(yaml.safe_dump(_config(urls, self._folder / KEYS_FILE), sort_keys=False), encoding="utf-8")
        command = [sys.executable, "-m", "tests.soak.served", str(self._window), "serve", "--config", str(config)]
        command += ["--seed", "1", "--state", str(self._folder / "state.json")]
        command += ["--request-log", str(self._folder / "requests.jsonl")]
        if self._plan.processes > 1:
            command += ["--processes", str(self._plan.processes)]
        self._processes.start_command("serve", command)
        found = self._processes.wait_for_line("serve", r"listening on http://(\S+):(\d+) \(admin (http://\S+)\)")
        self._admin = found[3]
        return found[1], int(found[2])

    async def _until_served(self, data: str) -> None:
        """Wait for an answer of each listener: the line that names them comes before the tasks that serve them."""
        async with httpx.AsyncClient() as http:
            for url in (data, self._admin):
                await http.get(f"{url}/health", timeout=LOOK_S_MAX)

    @property
    def _proxy(self) -> int:
        return self._processes._running["serve"].pid

    @property
    def _measured(self) -> list[int]:
        """The processes whose memory and time are the proxy's."""
        return [self._proxy] if self._plan.processes == 1 else process_tree(self._proxy)

    async def _shorts(self, load: Load, count: int) -> float:
        sampler = asyncio.create_task(self._sample())
        try:
            async with asyncio.timeout(self._plan.limit_s + SHORTS_S_MAX):
                return await load.shorts(count, connections=self._plan.connections)
        finally:
            sampler.cancel()

    async def _sample(self) -> None:
        while True:
            self._resident.append(resident_bytes(self._measured))
            await asyncio.sleep(SAMPLE_S)

    async def _look(self) -> Ledgers:
        """What the proxy holds now."""
        if self._plan.processes == 1:
            return await self._look_at(self._proxy, self._window)
        async with httpx.AsyncClient() as http:
            headers = {"authorization": f"Bearer {self._token}"}
            status = (await http.get(f"{self._admin}/admin/status", headers=headers, timeout=LOOK_S_MAX)).json()
        windows = {row["pid"]: self._folder / WINDOWS / f"{row['pid']}.json" for row in status["workers"]}
        return summed([await self._look_at(pid, window) for pid, window in windows.items()])

    async def _look_at(self, process: int, window: Path) -> Ledgers:
        before = Ledgers.read(window)
        seen = 0 if before is None else before.number
        os.kill(process, signal.SIGUSR1)
        async with asyncio.timeout(LOOK_S_MAX):
            while (found := Ledgers.read(window)) is None or found.number == seen:
                self._processes.check_alive()
                await asyncio.sleep(_POLL_S)
        return found

    async def _end_streams(self, load: Load) -> None:
        load.leave(load.streams[: self._plan.leave])
        for number in range(self._plan.replicas):
            os.kill(self._processes._running[f"engine-{number}"].pid, signal.SIGUSR1)
        async with asyncio.timeout(STREAMS_S_MAX):
            await load.streams_end()

    async def _back(self, fresh: Ledgers) -> Ledgers:
        """When nothing is open any more, or what is left when the time is over."""
        over_s = asyncio.get_running_loop().time() + BACK_S_MAX
        while True:
            found = await self._look()
            files = fds_allowed(fresh, self._plan.replicas * self._plan.processes)
            back = found.tasks <= fresh.tasks and found.fds <= files
            if (back and not found.open_ledgers()) or asyncio.get_running_loop().time() > over_s:
                return found
            await asyncio.sleep(0.2)

    def _stop(self) -> int:
        process = self._processes._running["serve"]
        process.terminate()
        return process.wait(BACK_S_MAX)


def _config(urls: dict[str, str], keys: Path) -> dict[str, object]:
    """Small pools, so that the prefix index is full after the warm-up; everything else as it comes."""
    capacity = {"kv_tokens": 100_000, "max_running_requests": 4096}
    return {
        "proxy": {
            "region": "here",
            "policy": "gorgo-ms",
            "shadow_policy": "nearest",
            "bind": "127.0.0.1:0",
            "admin_bind": "127.0.0.1:0",
            "probe_interval_s": 2.0,
            "scrape_interval_s": 2.0,
        },
        "regions": [{"name": "here"}],
        "replicas": [
            {
                "name": name,
                "region": "here",
                "url": url,
                "engine": "openai",
                "models": [MODEL],
                "capacity": dict(capacity),
            }
            for name, url in urls.items()
        ],
        "clients": {"keys_file": str(keys), "max_in_flight": 2000},
    }
