"""Times to first byte through `gorgo serve` in windows of two kinds: with some work beside the requests, and without.

The kinds take turns, so that both see the same machine. Between two halves of the windows without work the same
quantiles differ by chance alone: that difference is printed too.
"""

from __future__ import annotations

import time

import numpy as np

from gorgo.lab.simulate.compare import Ratio, ratio_of
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
    """Print p50 and p99 with and without the work, ms, and quotients with 95 % intervals over pairs of windows."""
    rows = {work: _quantiles(busy), "none": _quantiles(idle)}
    print(f"{'time to first byte':<18}  {'requests':>8}  {'p50 ms':>7}  {'p99 ms':>7}")
    for name, times in ((work, busy), ("none", idle)):
        p50, p99 = rows[name]
        print(f"{name:<18}  {sum(map(len, times)):>8,}  {p50:>7.2f}  {p99:>7.2f}")
    for name, over, under in (("with over without", busy, idle), ("by chance", idle[::2], idle[1::2])):
        print(f"{name:<18}  {'':>8}  {'  '.join(_quotients(over, under))}")


def _quotients(over: Windows, under: Windows) -> tuple[str, str]:
    """Return the mean quotients of p50 and of p99 of windows that follow one another, with their 95 % intervals."""
    pairs = [(np.percentile(a, [50, 99]), np.percentile(b, [50, 99])) for a, b in zip(over, under, strict=False)]
    p50, p99 = (_interval(ratio_of([(a.item(each), b.item(each)) for a, b in pairs])) for each in (0, 1))
    return p50, p99


def _interval(ratio: Ratio | None) -> str:
    if ratio is None or ratio.low is None or ratio.high is None:
        return "-" if ratio is None else f"{ratio.value:.3f}"
    return f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"


def _quantiles(windows: Windows) -> tuple[float, float]:
    """Return the medians over windows of their p50 and p99."""
    found = np.array([np.percentile(window, [50, 99]) for window in windows])
    p50, p99 = np.median(found, axis=0)
    return float(p50), float(p99)
