"""Time to first byte through `gorgo serve` while a round trains beside it, against windows in which none does.

Target: p99 within 5 %. The policy is `lodestar` with a model. Training is stopped by a freeze and started again by its
end, in turns of a few seconds.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path

from tests.bench.first_bytes import Windows, first_byte_times, print_windows
from tests.proxy.fakes import DONE, USAGE, delta, running, stream
from tests.proxy.followed import regions
from tests.proxy.served import Served, served

#: A round trains for longer than a window: each begins again with all outcomes.
LEARNING = {"first_samples": 300, "round_samples": 10, "epochs": 1000}
WINDOWS, WINDOW_S = 30, 3.0
WARM = 500


def run() -> None:
    """Print p50 and p99 with and without a round, ms, and their quotients."""
    while_training, idle = asyncio.run(_measure(int(os.environ.get("WINDOWS", WINDOWS))))
    print_windows("a round trains", while_training, idle)


async def _measure(windows: int) -> tuple[Windows, Windows]:
    """Return the times of each window with and without a round, ms."""
    answer = stream(delta("a"), delta("b"), USAGE, DONE)
    with tempfile.TemporaryDirectory() as folder:
        async with running(answer) as replica:
            proxy = {"policy": "lodestar", "learning": LEARNING}
            text = regions({"a": replica, "b": {"url": replica.url}}, proxy=proxy)
            (Path(folder) / "regions.yaml").write_bytes(text)
            async with served(Path(folder)) as gorgo:
                await first_byte_times(gorgo, WARM)
                while (await _shown(gorgo))["model"] is None:
                    await asyncio.sleep(0.2)
                found: dict[bool, Windows] = {True: [], False: []}
                for window in range(windows):
                    trains = window % 2 == 0
                    await gorgo.admin.post("/admin/unfreeze" if trains else "/admin/freeze", json={})
                    while (await _shown(gorgo))["training"]["state"] != ("training" if trains else "frozen"):
                        await first_byte_times(gorgo, 5)
                    await asyncio.sleep(2.0)  # the process has started
                    found[trains].append(await first_byte_times(gorgo, seconds=WINDOW_S))
                    state = (await _shown(gorgo))["training"]["state"]
                    assert state == ("training" if trains else "frozen"), state
                return found[True], found[False]


async def _shown(gorgo: Served) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = (await gorgo.admin.get("/admin/model")).json()
    return found
