"""Times to first byte through `gorgo serve` in windows of two kinds: with some work beside the requests, and without.

The kinds take turns, so that both see the same machine. Between two halves of the windows without work the same
quantiles differ by chance alone: that difference is printed too.
"""

from __future__ import annotations

import time

import numpy as np

from tests.proxy.fakes import chat
from tests.proxy.served import Served

Windows = list[list[float]]


async def first_byte_times(gorgo: Served, count: int | None = None, *, seconds: float = 3600.0) -> list[float]:
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


def print_windows(work: str, busy: Windows, idle: Windows) -> None:
    """Print p50 and p99 with and without the work, ms, and their quotients."""
    rows = {work: _quantiles(busy), "none": _quantiles(idle)}
    print(f"{'time to first byte':<18}  {'requests':>8}  {'p50 ms':>7}  {'p99 ms':>7}")
    for name, times in ((work, busy), ("none", idle)):
        p50, p99 = rows[name]
        print(f"{name:<18}  {sum(map(len, times)):>8,}  {p50:>7.2f}  {p99:>7.2f}")
    halves = [_quantiles(idle[half::2]) for half in (0, 1)]
    for name, (over, under) in (
        ("with over without", (rows[work], rows["none"])),
        ("by chance", (halves[0], halves[1])),
    ):
        print(f"{name:<18}  {'':>8}  {over[0] / under[0]:>7.3f}  {over[1] / under[1]:>7.3f}")


def _quantiles(windows: Windows) -> tuple[float, float]:
    """Return the medians over windows of their p50 and p99."""
    found = np.array([np.percentile(window, [50, 99]) for window in windows])
    p50, p99 = np.median(found, axis=0)
    return float(p50), float(p99)
