"""Time to first byte through `gorgo serve` while a round trains beside it, against windows in which none does.

Target: p99 within 5 %. The policy is `lodestar` with a model. In windows without a round its process is stopped: it is
the same process with the same memory, and a change takes no time.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.bench.first_bytes import first_byte_times
from tests.bench.paired_windows import Block, print_ratios
from tests.proxy.fakes import DONE, USAGE, delta, running, stream
from tests.proxy.followed import regions
from tests.proxy.served import Served, served

#: A round trains for longer than the windows.
LEARNING = {"first_samples": 5000, "round_samples": 10, "epochs": 1000}
BLOCKS, WINDOW_S = 72, 0.5
WARM = 5500
TRAINS, STOPPED = "a round trains", "it is stopped"
#: Of the windows of every other block.
ORDERS = ((TRAINS, STOPPED, STOPPED, TRAINS), (STOPPED, TRAINS, TRAINS, STOPPED))


def run() -> None:
    """Print p50 and p99 with and without a round, ms, and their ratios."""
    print_ratios(asyncio.run(_measure(int(os.environ.get("BLOCKS", BLOCKS)))), over=STOPPED)


async def _measure(blocks: int) -> list[Block]:
    """Return the times of each window, ms."""
    answer = stream(delta("a"), delta("b"), USAGE, DONE)
    with tempfile.TemporaryDirectory() as folder:
        async with running(answer) as replica:
            proxy = {"policy": "lodestar", "learning": LEARNING}
            text = regions({"a": replica, "b": {"url": replica.url}}, proxy=proxy)
            (Path(folder) / "regions.yaml").write_bytes(text)
            async with served(Path(folder)) as gorgo:
                await first_byte_times(gorgo, WARM)
                while (await _training(gorgo))["state"] != "training":
                    await first_byte_times(gorgo, 5)
                pid = int(str((await _training(gorgo))["pid"]))
                await asyncio.sleep(2.0)  # the process has started
                try:
                    found = [await _block(gorgo, pid, ORDERS[block % 2]) for block in range(blocks)]
                    assert (await _training(gorgo))["state"] == "training", "one round for all windows"
                    return found
                finally:
                    os.kill(pid, signal.SIGKILL)  # else it ends its round first


async def _block(gorgo: Served, pid: int, kinds: Sequence[str]) -> Block:
    times: dict[str, list[list[float]]] = {TRAINS: [], STOPPED: []}
    for kind in kinds:
        os.kill(pid, signal.SIGCONT if kind == TRAINS else signal.SIGSTOP)
        times[kind].append(await first_byte_times(gorgo, seconds=WINDOW_S))
    return {kind: (first, second) for kind, (first, second) in times.items()}


async def _training(gorgo: Served) -> dict[str, object]:
    found: dict[str, object] = (await gorgo.admin.get("/admin/model")).json()["training"]
    return found
