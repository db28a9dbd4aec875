"""`python -m tests.peers_live.workers [--processes N] [--pairs N]`: does a router of N processes route as one?

Runs of `gorgo serve` with one process and with N take turns, each over simulated engines that have just started, with
the same first requests of a trace. Shows the cached tokens, p95 TTFT and p95 E2E of each run, and the differences of
the pairs.
"""

# ruff: noqa: T201 - a command says what it found

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import numpy as np

from gorgo.lab.datasets import load_requests
from gorgo.lab.traces import TraceFilters, TraceRequest, scheduled_s
from tests.bench.relay.measure import describe_machine
from tests.bench.training_beside import median_ratio
from tests.peers_live.__main__ import Figures, _figures
from tests.peers_live.fleet import drive, running


def measure(requests: Sequence[TraceRequest], processes: int, *, time_scale: float) -> Figures:
    """Return what became of the requests at a new router over new engines."""
    with (
        tempfile.TemporaryDirectory(prefix="gorgo-peers-") as folder,
        running(Path(folder), [None], options=("--processes", str(processes))) as routers,
    ):
        return _figures(asyncio.run(drive(requests, routers, lambda _: 0, time_scale=time_scale)))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.peers_live.workers", description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--trace", default="art-chat-apr5")
    parser.add_argument("--limit", type=int, default=300)
    parser.add_argument("--time-scale", type=float, default=1.0)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is stopped
    filters = TraceFilters(max_input=12_000, max_output=128)
    requests = load_requests(given.trace, filters, seed=0)[: given.limit]
    lasts_s = scheduled_s(requests[-1], given.time_scale)
    print(f"{describe_machine()}\n{given.trace}, first {len(requests)} requests in {lasts_s:.0f} s", flush=True)
    pairs: list[tuple[Figures, Figures]] = []
    for number in range(given.pairs):
        found: dict[int, Figures] = {}
        for count in (1, given.processes) if number % 2 == 0 else (given.processes, 1):
            found[count] = figures = measure(requests, count, time_scale=given.time_scale)
            print(
                f"{count} processes: {figures.failed} failed, {figures.hit:.2%} cached, p95 TTFT "
                f"{figures.ttft_ms_p95:.0f} ms, p95 E2E {figures.e2e_s_p95:.2f} s, load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
        pairs.append((found[1], found[given.processes]))
    points = mean(several.hit - one.hit for one, several in pairs) * 100
    print(f"\n{given.processes} processes against one, {len(pairs)} pairs: cached tokens {points:+.2f} points")
    for name in ("ttft_ms_p95", "e2e_s_p95"):
        ratios = [getattr(several, name) / getattr(one, name) for one, several in pairs]
        value, low, high = median_ratio(np.log(ratios))
        print(f"{name} {value:.3f} [{low:.3f}, {high:.3f}]")
    return 1 if any(figures.failed for pair in pairs for figures in pair) else 0


if __name__ == "__main__":
    sys.exit(main())
