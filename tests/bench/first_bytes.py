"""Times to first byte through `gorgo serve` in windows of two kinds: with some work beside the requests, and without.

The kinds take turns, so that neighbours see the same machine. Between windows without work the same quantiles differ by
chance alone: that difference is printed too.
"""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from tests.proxy.fakes import chat
from tests.proxy.served import Served

Windows = list[list[float]]

#: Of pairs of windows, for an interval.
DRAWS = 2000


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
    """Print p50 and p99 with and without the work, ms, and the quotient of neighbours with its 95 % interval."""
    found = {work: _quantiles(busy), "none": _quantiles(idle)}
    print(f"{'time to first byte':<18}  {'requests':>8}  {'p50 ms':>20}  {'p99 ms':>20}")
    for name, times in ((work, busy), ("none", idle)):
        p50, p99 = np.median(found[name], axis=0)
        print(f"{name:<18}  {sum(map(len, times)):>8,}  {p50:>20.2f}  {p99:>20.2f}")
    halves = found["none"][: len(found["none"]) // 2 * 2]
    for name, over, under in (
        ("with over without", found[work], found["none"]),
        ("by chance", halves[::2], halves[1::2]),
    ):
        print(f"{name:<18}  {'':>8}  {_quotient(over, under, 0)}  {_quotient(over, under, 1)}")


def _quantiles(windows: Windows) -> NDArray[np.float64]:
    """Return p50 and p99 of each window."""
    return np.array([np.percentile(window, [50, 99]) for window in windows])


def _quotient(over: NDArray[np.float64], under: NDArray[np.float64], column: int) -> str:
    """Return the median quotient of windows that follow one another, and how far it varies with the pairs drawn."""
    quotients = over[:, column] / under[:, column]
    drawn = np.random.default_rng(0).choice(quotients, (DRAWS, len(quotients)))
    low, high = np.quantile(np.median(drawn, axis=1), [0.025, 0.975])
    return f"{np.median(quotients):>6.3f} [{low:.3f}, {high:.3f}]"
