"""Time to first byte through `gorgo serve` while a round trains beside it, against windows in which none does.

Target: p99 within 5 %. The policy is `lodestar` with a model. In windows without a round its process is stopped: it is
the same process with the same memory, and a change takes no time. Two other neighbours say what the machine does to the
same times: they only count, at the same priority, one in the same slices and pauses, one all the time.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from gorgo.live.training.service import NICENESS
from tests.bench.first_bytes import first_byte_times
from tests.bench.paired_windows import Block, print_ratios
from tests.proxy.fakes import DONE, USAGE, delta, running, stream
from tests.proxy.followed import regions
from tests.proxy.served import Served, served

#: A round trains for longer than the windows.
LEARNING = {"first_samples": 5000, "round_samples": 10, "epochs": 1000}
BLOCKS, WINDOW_S = 24, 0.5
WARM = 5500
TRAINS, STOPPED = "a round trains", "nothing beside"
SLICES, COUNTS = "a process counts in slices", "a process counts"
#: Of the windows of a block, and reversed after it; the next block begins with another one.
KINDS = (TRAINS, STOPPED, SLICES, COUNTS)
#: What only counts: it has no memory to speak of, and speaks to nobody.
_PACED = "from gorgo.live.training.worker import pace; pace()"
_COUNT = f"import os; os.nice({NICENESS})\n{{}}\nwhile True: pass"


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
                pids = {TRAINS: int(str((await _training(gorgo))["pid"]))}
                pids |= {kind: _counting(kind) for kind in (SLICES, COUNTS)}
                await asyncio.sleep(2.0)  # the processes have started
                try:
                    found = [await _block(gorgo, pids, block) for block in range(blocks)]
                    assert (await _training(gorgo))["state"] == "training", "one round for all windows"
                    return found
                finally:
                    for pid in pids.values():
                        os.kill(pid, signal.SIGKILL)  # one that is stopped does not hear of the proxy's end


def _counting(kind: str) -> int:
    words = _COUNT.format(_PACED if kind == SLICES else "")
    return subprocess.Popen([sys.executable, "-c", words]).pid


async def _block(gorgo: Served, pids: Mapping[str, int], block: int) -> Block:
    first = block % len(KINDS)
    order = (*KINDS[first:], *KINDS[:first])
    times: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
    for kind in (*order, *reversed(order)):
        for beside, pid in pids.items():
            os.kill(pid, signal.SIGCONT if beside == kind else signal.SIGSTOP)
        times[kind].append(await first_byte_times(gorgo, seconds=WINDOW_S))
    return {kind: (first, second) for kind, (first, second) in times.items()}


async def _training(gorgo: Served) -> dict[str, object]:
    found: dict[str, object] = (await gorgo.admin.get("/admin/model")).json()["training"]
    return found
