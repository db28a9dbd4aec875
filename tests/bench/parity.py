"""A live replay in wall time against the simulator on the same requests: how far apart are their TTFTs?

Real `gorgo engine` and `gorgo serve` processes, and a real client; the simulator is given the same fleet, the same
policy and the proxy's own fingerprint of the same prompts. The live jitter is another draw than the simulated one, so
several seeds are simulated and their range is printed beside the difference. Needs the machine for itself for about
three minutes: a core that is busy elsewhere is in the live figures.

    python -m tests.bench parity
    python -m tests.bench.parity --requests 20 --policy gorgo
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gorgo.config.load import load_config
from gorgo.config.router_settings import router_limits
from gorgo.config.values import BLOCK_BYTES
from gorgo.lab.datasets import load_requests
from gorgo.lab.demo import MODEL, running_fleet
from gorgo.lab.prompt_text import BYTES_PER_TOKEN
from gorgo.lab.replay import replay
from gorgo.lab.replay_client import ReplayOptions
from gorgo.lab.results import ResultRow
from gorgo.lab.sim.fleet import fleet_of
from gorgo.lab.sim.simulation import Simulation
from gorgo.lab.simulate.feed import fingerprinted
from gorgo.lab.simulate.job import SimJob
from gorgo.lab.simulate.run import simulated_run
from gorgo.lab.traces import TraceFilters, TraceRequest
from gorgo.policies.registry import make_policy

TRACE, REQUESTS, TIME_SCALE, POLICY = "art-chat-apr5", 600, 1.25, "gorgo-ms"
#: Of the two to be called alike.
TARGET = 0.10
SEEDS = range(5)


def run(*, requests: int = REQUESTS, trace: str = TRACE, time_scale: float = TIME_SCALE, policy: str = POLICY) -> None:
    """Replay, simulate, and print both."""
    rows = load_requests(trace, TraceFilters(limit=requests))
    print(f"{len(rows)} requests of {trace} at time_scale {time_scale:g} by {policy}, live in wall time and simulated")
    with tempfile.TemporaryDirectory(prefix="gorgo-parity-") as folder:
        live = replayed(rows, Path(folder), trace=trace, time_scale=time_scale, policy=policy)
        simulated = [
            simulate(rows, Path(folder), seed=seed, trace=trace, time_scale=time_scale, policy=policy) for seed in SEEDS
        ]
    report(live, simulated)


def replayed(rows: Sequence[TraceRequest], folder: Path, *, trace: str, time_scale: float, policy: str) -> ResultRow:
    """Through real processes."""
    with running_fleet(policy, folder=folder, seed=0) as fleet:
        options = ReplayOptions(
            trace=Path(trace), url=fleet.url, time_scale=time_scale, model=MODEL, policy=policy, label="live"
        )
        row = asyncio.run(replay(rows, options)).row
        fleet.processes.check_alive()
    return row


def simulate(
    rows: Sequence[TraceRequest], folder: Path, *, seed: int, trace: str, time_scale: float, policy: str
) -> ResultRow:
    """The same in virtual time, on the configuration that the processes had."""
    path = folder / "regions.yaml"
    config = load_config(path)
    fleet = fleet_of(config, source=path)
    simulation = Simulation(
        fleet,
        make_policy(policy),
        seed=seed,
        limits=router_limits(config),
        probe_interval_s=config.proxy.probe_interval_s,
        scrape_interval_s=config.proxy.scrape_interval_s,
        block_tokens=BLOCK_BYTES // BYTES_PER_TOKEN,
    )
    feed = fingerprinted(rows, model=MODEL, key=0, block_bytes=BLOCK_BYTES, time_scale=time_scale)
    result = simulation.run(feed)
    job = SimJob(trace=trace, policy=policy, fleet=fleet, time_scale=time_scale, seed=seed)
    return simulated_run(job, dict(simulation.router.settings.weights), result).row


def report(live: ResultRow, simulated: Sequence[ResultRow]) -> None:
    """Both, and how far apart."""
    print(
        f"errors: live {live.errors}, simulated {simulated[0].errors}; slip p95 of the client {live.slip_ms_p95:.1f} ms"
    )
    print(f"cache hit: live {live.cache_hit or 0:.1%}, simulated {simulated[0].cache_hit or 0:.1%}")
    print(f"share: live {_shares(live)}, simulated {_shares(simulated[0])}")
    print(f"{'':12} {'live':>9} {'simulated':>9}  range over {len(simulated)} seeds   difference")
    for name, measure, factor in (("TTFT", "ttft_ms", 1.0), ("E2E", "e2e_s", 1e3)):
        for quantile in ("p50", "p95"):
            one = getattr(getattr(live, measure), quantile) * factor
            others = np.array([getattr(getattr(row, measure), quantile) for row in simulated]) * factor
            apart = float(others.mean()) / one - 1
            verdict = "" if name != "TTFT" else " within 10 %" if abs(apart) <= TARGET else " NOT within 10 %"
            print(
                f"{name} {quantile} ms  {one:9.1f} {others.mean():9.1f}  {others.min():9.1f} to {others.max():7.1f}   "
                f"{apart:+.1%}{verdict}"
            )


def _shares(row: ResultRow) -> str:
    return "/".join(f"{share:.0%}" for _, share in sorted(row.share.items()))


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--requests", type=int, default=REQUESTS)
    arguments.add_argument("--trace", default=TRACE)
    arguments.add_argument("--time-scale", type=float, default=TIME_SCALE)
    arguments.add_argument("--policy", default=POLICY)
    run(**vars(arguments.parse_args()))
