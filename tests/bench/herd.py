"""Sessions that share a system prompt, live: the `herd` trace at four times its speed before eight `gorgo engine`.

Each policy has a fresh fleet: eight simulated H100 in one region, each its own process, and `gorgo serve` on loopback.
The replay sends the requests at their times. With `GORGO_BENCH_SHORT=1` only the first four rounds are sent.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gorgo.lab.datasets import load_requests, shapes
from gorgo.lab.demo import MODEL, FleetLayout, running_fleet
from gorgo.lab.replay import replay
from gorgo.lab.replay_client import ReplayOptions
from gorgo.lab.results import ResultRow
from gorgo.lab.sim.engine.profiles import find_profile
from gorgo.lab.traces import TraceFilters
from tests.bench.relay.measure import describe_machine

POLICIES = ("gorgo-ms", "prefix-cache-and-load", "lmetric")
TRACE, SPEED, SESSIONS, SHORT_ROUNDS = "herd", 4.0, 61, 4
#: The engines of the simulated rows, under SGLang's interface, with what a proxy would be configured with.
_PROFILE = find_profile("1xH100-Llama-3.1-8B")
LAYOUT = FleetLayout(
    profile=_PROFILE.name,
    round_trip_ms={"local": 1},
    replicas={f"h100-{number}": "local" for number in range(8)},
    capacity={"prefill_tokens_per_s": round(_PROFILE.prefill_tokens_per_s)},
)
_HEADER = (
    "policy",
    "n",
    "errors",
    "TTFT mean ms",
    "p50",
    "p95",
    "p99",
    "E2E p95 s",
    "hit %",
    "largest share %",
    "late",
)


def run() -> None:
    """Print a row per policy; `late` is the p95 of how late the replay itself sent a request, ms."""
    short = os.environ.get("GORGO_BENCH_SHORT") == "1"
    filters = TraceFilters(limit=SESSIONS * SHORT_ROUNDS if short else None)
    print(f"{TRACE} at {SPEED:g} times its speed, eight engines on loopback; {describe_machine()}")
    print(" | ".join(_HEADER))
    with tempfile.TemporaryDirectory(prefix="gorgo-bench-") as folder:
        for policy in POLICIES:
            row = measure(policy, filters, Path(folder) / policy)
            print(" | ".join(cells_of(row)), flush=True)


def measure(policy: str, filters: TraceFilters, folder: Path, *, layout: FleetLayout = LAYOUT) -> ResultRow:
    """Replay the trace under a policy before a fresh fleet, and return the row of its result."""
    folder.mkdir(parents=True)
    with running_fleet(policy, folder=folder, seed=0, layout=layout) as fleet:
        options = ReplayOptions(
            trace=shapes()[TRACE],
            url=fleet.url,
            filters=filters,
            time_scale=1 / SPEED,
            out=folder,
            model=MODEL,
            policy=policy,
            weights=fleet.weights(),
            show_progress=False,
            label=policy,
        )
        report = asyncio.run(replay(load_requests(TRACE, filters, seed=0), options))
        fleet.processes.check_alive()
    return report.row


def cells_of(row: ResultRow) -> Sequence[str]:
    """Return the cells of a row."""
    ttft = (row.ttft_ms.mean, row.ttft_ms.p50, row.ttft_ms.p95, row.ttft_ms.p99)
    return (
        row.policy or "-",
        str(row.n),
        str(row.errors),
        *(_number(value, ".0f") for value in ttft),
        _number(row.e2e_s.p95, ".2f"),
        _number(row.cache_hit, ".1f", 100.0),
        _number(max(row.share.values(), default=None), ".0f", 100.0),
        _number(row.slip_ms_p95, ".1f"),
    )


def _number(value: float | None, form: str, factor: float = 1.0) -> str:
    return "-" if value is None else format(factor * value, form)


if __name__ == "__main__":
    run()
