"""One stall of an engine costs it no more than the stall, with real processes, in both front ends.

An engine of three is stopped for 8 s under load (SIGSTOP) and goes on. What its late first tokens teach would make it
look slow for minutes: within twenty seconds it has its share again. A minute and a half each.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import pytest
import yaml

from gorgo.config.load import parse_config
from gorgo.lab.demo import Processes
from gorgo.picker.envoy import envoy_config
from tests.picker.envoy.envoy import PROGRAM, needs_envoy
from tests.ports import free_ports

NAMES = ("a", "b", "c")
#: Stopped.
VICTIM = "b"
#: Between two requests, s: a third of what the engines can do. Each has a prompt of its own, of some 2,000 tokens.
EVERY_S, WORDS = 1 / 12, 1500
#: Load until the stall, s, of which the last part is the share before; the stall; and until the share is looked at.
WARM_S, BEFORE_S, STALL_S, WITHIN_S, AFTER_S = 30.0, 20.0, 8.0, 20.0, 20.0
#: Of the share before: 240 requests in `AFTER_S`, of which a third has a deviation of 9 %.
LEAST = 0.7
START_S, PATIENCE_S = 120.0, 40.0


@pytest.mark.parametrize("front", ["serve", pytest.param("picker", marks=needs_envoy)])
async def test_an_engine_has_its_share_again_within_twenty_seconds_of_a_stall(front: str, tmp_path: Path) -> None:
    with fleet(front, tmp_path) as (url, victim):
        begun_s = time.monotonic()
        sent: list[tuple[float, str]] = []
        load = asyncio.create_task(send(url, begun_s, sent))
        await asyncio.sleep(WARM_S)
        os.kill(victim, signal.SIGSTOP)
        await asyncio.sleep(STALL_S)
        os.kill(victim, signal.SIGCONT)
        await load
    resumed_s = WARM_S + STALL_S
    before = share(sent, WARM_S - BEFORE_S, WARM_S)
    shares = [share(sent, resumed_s + at_s, resumed_s + at_s + 5.0) for at_s in range(0, 40, 5)]
    after = share(sent, resumed_s + WITHIN_S, resumed_s + WITHIN_S + AFTER_S)
    shown = " ".join(f"{each:.0%}" for each in shares)
    sys.stdout.write(f"{front}: {before:.0%} before, after the stall each 5 s {shown}\n")
    assert before > 0.2
    assert after > LEAST * before


def share(sent: list[tuple[float, str]], since_s: float, until_s: float) -> float:
    """Return the stopped engine's share of the requests that were sent in a time."""
    names = [name for at_s, name in sent if since_s <= at_s < until_s]
    return names.count(VICTIM) / max(1, len(names))


async def send(url: str, begun_s: float, sent: list[tuple[float, str]]) -> None:
    """Send requests at an even pace; note for each when it was sent, and who answered."""
    tasks, due_s = list[asyncio.Task[None]](), 0.0
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        while due_s < WARM_S + STALL_S + WITHIN_S + AFTER_S:
            await asyncio.sleep(begun_s + due_s - time.monotonic())
            tasks.append(asyncio.create_task(ask(session, url, len(tasks), due_s, sent)))
            due_s += EVERY_S
        await asyncio.gather(*tasks)


async def ask(
    session: aiohttp.ClientSession, url: str, number: int, at_s: float, sent: list[tuple[float, str]]
) -> None:
    text = " ".join(f"{number}-{word}" for word in range(WORDS))
    body = {"messages": [{"role": "user", "content": text}], "stream": True, "max_tokens": 4}
    async with asyncio.timeout(PATIENCE_S), session.post(f"{url}/v1/chat/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        assert b"[DONE]" in await answer.read()
        sent.append((at_s, answer.headers["x-gorgo-replica"]))


@contextmanager
def fleet(front: str, folder: Path) -> Iterator[tuple[str, int]]:
    """Engines and a front end before them; yield its URL, and the process of the engine that is stopped."""
    data, admin, picker, *ports = free_ports(3 + len(NAMES))
    document = {
        "proxy": {"region": "here", "bind": f"127.0.0.1:{data}", "admin_bind": f"127.0.0.1:{admin}"},
        "picker": {"bind": f"127.0.0.1:{picker}"},
        "regions": [{"name": "here"}],
        "replicas": [
            {"name": name, "region": "here", "url": f"http://127.0.0.1:{port}", "engine": "sglang"}
            for name, port in zip(NAMES, ports, strict=True)
        ],
        "simulation": {"rtt_ms": {"here": 1}},
    }
    config = folder / "regions.yaml"
    config.write_text(yaml.safe_dump(document))
    with Processes(folder, {**os.environ, "PYTHONUNBUFFERED": "1"}) as processes:
        for name in NAMES:
            processes.start(name, ["engine", "--replica", name, "--config", str(config)])
        for name in NAMES:
            processes.wait_for_line(name, "listening on", timeout_s=START_S)
        processes.start(front, [front, "--config", str(config), "--log-level", "error"])
        processes.wait_for_line(front, "listening on", timeout_s=START_S)
        if front == "picker":
            file = folder / "envoy.yaml"
            file.write_text(json.dumps(envoy_config(parse_config(config.read_bytes()))))
            words = [str(PROGRAM), "-c", str(file), "--concurrency", "1", "--disable-hot-restart", "-l", "info"]
            processes.start_command("envoy", words)
            processes.wait_for_line("envoy", "starting main dispatch loop", timeout_s=START_S)
        yield f"http://127.0.0.1:{data}", processes._running[VICTIM].pid
