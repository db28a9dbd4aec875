"""Time to first byte through `gorgo serve` while a round trains beside it, against windows in which none does.

Target: p99 within 5 %. The policy is `lodestar` with a model. Training is stopped by a freeze and started again by its
end, in turns of a few seconds, so that both kinds of windows see the same machine. Between two halves of the windows
without training the same quantiles differ by chance alone: that difference is printed too.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from pathlib import Path

import numpy as np

from tests.proxy.fakes import DONE, USAGE, chat, delta, running, stream
from tests.proxy.followed import regions
from tests.proxy.served import Served, served

#: A round trains for longer than a window: each begins again with all outcomes.
LEARNING = {"first_samples": 300, "round_samples": 10, "epochs": 1000}
WINDOWS, WINDOW_S = 24, 5.0
WARM = 500


def run() -> None:
    """Print p50 and p99 with and without a round, ms, and their quotients."""
    while_training, idle = asyncio.run(_measure(int(os.environ.get("WINDOWS", WINDOWS))))
    halves = [_quantiles(idle[half::2]) for half in (0, 1)]
    rows = {"a round trains": _quantiles(while_training), "none": _quantiles(idle)}
    print(f"{'time to first byte':<18}  {'requests':>8}  {'p50 ms':>7}  {'p99 ms':>7}")
    for name, times in (("a round trains", while_training), ("none", idle)):
        p50, p99 = rows[name]
        print(f"{name:<18}  {sum(map(len, times)):>8,}  {p50:>7.2f}  {p99:>7.2f}")
    for name, (over, under) in (
        ("with over without", (rows["a round trains"], rows["none"])),
        ("by chance", (halves[0], halves[1])),
    ):
        print(f"{name:<18}  {'':>8}  {over[0] / under[0]:>7.3f}  {over[1] / under[1]:>7.3f}")


async def _measure(windows: int) -> tuple[list[list[float]], list[list[float]]]:
    """Return the times of each window with and without a round, ms."""
    answer = stream(delta("a"), delta("b"), USAGE, DONE)
    with tempfile.TemporaryDirectory() as folder:
        async with running(answer) as replica:
            proxy = {"policy": "lodestar", "learning": LEARNING}
            text = regions({"a": replica, "b": {"url": replica.url}}, proxy=proxy)
            (Path(folder) / "regions.yaml").write_bytes(text)
            async with served(Path(folder)) as gorgo:
                await _requests(gorgo, WARM)
                while (await _shown(gorgo))["model"] is None:
                    await asyncio.sleep(0.2)
                found: dict[bool, list[list[float]]] = {True: [], False: []}
                for window in range(windows):
                    trains = window % 2 == 0
                    await gorgo.admin.post("/admin/unfreeze" if trains else "/admin/freeze", json={})
                    while (await _shown(gorgo))["training"]["state"] != ("training" if trains else "frozen"):
                        await _requests(gorgo, 5)
                    await asyncio.sleep(2.0)  # the process has started
                    found[trains].append(await _requests(gorgo, seconds=WINDOW_S))
                    state = (await _shown(gorgo))["training"]["state"]
                    assert state == ("training" if trains else "frozen"), state
                return found[True], found[False]


async def _shown(gorgo: Served) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = (await gorgo.admin.get("/admin/model")).json()
    return found


async def _requests(gorgo: Served, count: int | None = None, *, seconds: float = 3600.0) -> list[float]:
    """Send streams one after the other; return the times to their first byte, ms."""
    times: list[float] = []
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s and len(times) != count:
        content = chat(stream=True, messages=[{"role": "user", "content": "x" * (100 + 37 * (len(times) % 200))}])
        begun = time.perf_counter()
        async with gorgo.client.stream("POST", "/v1/chat/completions", content=content) as response:
            assert response.status_code == 200
            chunks = response.aiter_raw()
            await anext(chunks)
            times.append((time.perf_counter() - begun) * 1e3)
            async for _ in chunks:
                pass
    return times


def _quantiles(windows: list[list[float]]) -> tuple[float, float]:
    """Return the medians over windows of their p50 and p99."""
    found = np.array([np.percentile(window, [50, 99]) for window in windows])
    p50, p99 = np.median(found, axis=0)
    return float(p50), float(p99)
