"""A short day with real processes: `gorgo serve` says how many replicas are wanted, and `gorgo engine` is started and
stopped by that number, with a start-up time. No autoscaler stands between.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import httpx
import pytest
import yaml

from tests.system.processes import TOKEN, RouterProcess, router_process

pytestmark = [pytest.mark.system, pytest.mark.timeout(420)]

STARTUP_S, TTFT_S, MOST = 10.0, 6.0, 5
#: Seconds of the day and requests per second until then; a prompt takes an engine 1.2 s.
DAY = ((40.0, 0.25), (80.0, 0.5), (120.0, 0.8), (165.0, 1.1), (235.0, 0.1))
AUTHORIZED = {"authorization": f"Bearer {TOKEN}"}
SCALING = f"scaling: {{ttft_ms: {TTFT_S * 1e3}, startup_s: {STARTUP_S}, max_replicas: {MOST}}}\n"


@dataclass
class Engines:
    """Processes of `gorgo engine`, by their replica's name; stopped with the stack."""

    folder: Path
    stack: AsyncExitStack
    running: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)
    #: Replicas that are paid for, at each second.
    counts: list[int] = field(default_factory=list)
    started: int = 0

    async def start(self) -> tuple[str, str]:
        """Return name and URL of one more."""
        name, self.started = f"r{self.started}", self.started + 1
        config = self.folder / "engines.yaml"
        names = [{"name": f"r{n}", "region": "here", "url": "http://127.0.0.1:1"} for n in range(40)]
        simulated = {"rtt_ms": {"here": 1}, "profile": "1xL20-Llama-3.1-8B"}
        document = {"proxy": {"region": "here"}, "regions": [{"name": "here"}], "replicas": names}
        config.write_text(yaml.safe_dump({**document, "simulation": simulated}))
        log = self.stack.enter_context((self.folder / f"{name}.log").open("wb"))
        arguments = ("-m", "gorgo", "engine", "--replica", name, "--config", str(config), "--port", "0")
        process = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, stdout=asyncio.subprocess.PIPE, stderr=log
        )
        self.running[name] = process
        self.stack.push_async_callback(self.stop, name)
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
        return name, line.split()[-1]

    async def stop(self, name: str) -> None:
        process = self.running.pop(name, None)
        if process is not None and process.returncode is None:
            process.send_signal(signal.SIGTERM)
            await process.wait()


@dataclass
class Day:
    """What the clients saw: times of first tokens, s; infinite without one."""

    ttfts_s: list[float] = field(default_factory=list)

    async def run(self, http: httpx.AsyncClient, url: str) -> None:
        rng, begun_s = random.Random(7), monotonic()
        async with asyncio.TaskGroup() as tasks:
            for until_s, rate in DAY:
                while (now_s := monotonic() - begun_s) < until_s:
                    await asyncio.sleep(min(rng.expovariate(rate), until_s - now_s))
                    tasks.create_task(self._ask(http, url, rng.getrandbits(40)))

    async def _ask(self, http: httpx.AsyncClient, url: str, number: int) -> None:
        text = f"{number} " * 1700
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 40, "stream": True}
        sent_s = monotonic()
        ttft_s = float("inf")
        async with http.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                has_text = line.startswith("data: {") and any(
                    choice["delta"].get("content") for choice in json.loads(line[6:])["choices"]
                )
                if has_text and ttft_s == float("inf"):
                    ttft_s = monotonic() - sent_s
        self.ttfts_s.append(ttft_s)


async def follow(http: httpx.AsyncClient, router: RouterProcess, engines: Engines, end: asyncio.Event) -> None:
    """Start and stop engines by the number, as an autoscaler would, each second until `end`."""
    starting: dict[asyncio.Task[tuple[str, str]], float] = {}
    serving, leaving = ["r0"], list[str]()
    while not end.is_set():
        status = (await http.get(f"{router.admin_url}/admin/status", headers=AUTHORIZED)).json()
        wanted = next((row["wanted"] for row in status["scaling"]), 1)
        for task, wished_s in list(starting.items()):
            if task.done() and monotonic() >= wished_s + STARTUP_S:
                del starting[task]
                name, url = task.result()
                await admin(http, router, "POST", "/admin/replicas", name=name, region="here", url=url)
                serving.append(name)
        for _ in range(wanted - len(serving) - len(starting)):
            starting[asyncio.create_task(engines.start())] = monotonic()
        while len(serving) > max(wanted, 1) and not starting:
            leaving.append(serving.pop())
            await admin(http, router, "DELETE", f"/admin/replicas/{leaving[-1]}")
        known = {row["name"] for row in status["replicas"]}
        for name in [each for each in leaving if each not in known]:
            leaving.remove(name)
            await engines.stop(name)
        engines.counts.append(len(serving) + len(starting) + len(leaving))
        await asyncio.sleep(1.0)


async def admin(http: httpx.AsyncClient, router: RouterProcess, method: str, path: str, **body: Any) -> None:
    answer = await http.request(method, f"{router.admin_url}{path}", json=body, headers=AUTHORIZED)
    assert answer.status_code < 300, answer.text


async def test_a_short_day_is_served_by_engines_that_the_number_starts_and_stops(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        engines = Engines(tmp_path, stack)
        name, url = await engines.start()
        more = "overload: {slow_start_s: 0.0}\n" + SCALING
        router = stack.enter_context(router_process(tmp_path, {name: url}, engine="auto", more=more))
        http = await stack.enter_async_context(httpx.AsyncClient(timeout=120))
        day, end = Day(), asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(follow(http, router, engines, end))
            await day.run(http, router.url)
            end.set()
        in_time = sum(ttft_s <= TTFT_S for ttft_s in day.ttfts_s) / len(day.ttfts_s)
        mean = sum(engines.counts) / len(engines.counts)
        told = f"{len(day.ttfts_s)} requests, {in_time:.1%} in time, {mean:.2f} of {max(engines.counts)} replicas"
        assert 3 <= max(engines.counts) <= MOST, told
        assert engines.counts[-1] <= 2, told
        assert in_time >= 0.8, told
        assert mean <= 0.8 * max(engines.counts), told
