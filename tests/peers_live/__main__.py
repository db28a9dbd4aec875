"""`python -m tests.peers_live`: four live routers with and without a store, and the same in virtual time.

Sends the first requests of a trace to four `gorgo serve` over simulated engines, each to the router that the simulation
has for it. Shows hit, p95 TTFT and p95 E2E of both, their ratios, and what the store costs a router. Exit code 1 if a
ratio is beyond 10 %.
"""

# ruff: noqa: T201 - a command says what it found

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

import httpx
import yaml

from gorgo.config.load import load_config
from gorgo.config.values import BLOCK_BYTES
from gorgo.lab.datasets import load_requests
from gorgo.lab.prompt_text import BYTES_PER_TOKEN
from gorgo.lab.replay_client import ReplayRecord
from gorgo.lab.sim.fleet import fleet_of, limits_of
from gorgo.lab.sim.records import SimRecord
from gorgo.lab.sim.routers import RouterGroup, Sharing
from gorgo.lab.sim.workload import SimRequest
from gorgo.lab.simulate import SimJob, run_once
from gorgo.lab.simulate.feed import fingerprinted
from gorgo.lab.traces import TraceFilters, TraceRequest, scheduled_s
from tests.bench.relay.measure import describe_machine
from tests.live.peer_store import server
from tests.peers_live.fleet import MODEL, Router, configuration, drive, running

#: Largest difference of a live figure from the simulated one.
WITHIN = 0.10
#: Simulated runs, which differ in what the network draws: the 20 slowest of 400 requests are few.
SEEDS = 8
SHARINGS: tuple[Sharing, ...] = ("none", "store")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What became of all requests."""

    requests: int
    failed: int
    hit: float
    ttft_ms_p95: float
    e2e_s_p95: float


@dataclass(frozen=True, slots=True)
class Cost:
    """What a router uses, in the mean over all."""

    cpu_share: float
    reports_per_s: float
    written_per_s: float
    read_per_s: float
    write_ms: float


def main() -> int:
    given = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is stopped
    filters = TraceFilters(max_input=given.max_input, max_output=given.max_output)
    requests = load_requests(given.trace, filters, seed=0)[: given.limit]
    lasts_s = scheduled_s(requests[-1], given.time_scale)
    print(describe_machine(), flush=True)
    print(f"{given.trace}, first {len(requests)} requests in {lasts_s:.0f} s, {given.routers} routers", flush=True)
    print(f"{'sharing':8} {'':9} {'failed':>6} {'hit':>7} {'p95 TTFT ms':>12} {'p95 E2E s':>10}", flush=True)
    missed = []
    for sharing in given.sharing or SHARINGS:
        group = RouterGroup(count=given.routers, sharing=sharing)
        with tempfile.TemporaryDirectory(prefix="gorgo-peers-") as folder:
            live, cost = _live(requests, group, given.time_scale, Path(folder))
            runs = [_simulated(requests, group, given.time_scale, Path(folder), seed=seed) for seed in range(SEEDS)]
        virtual = _mean(runs)
        _show(sharing, "live", live)
        _show(sharing, "simulated", virtual)
        missed += list(_compare(sharing, live, virtual))
        print(
            f"{sharing:8} a router: {cost.cpu_share:.2%} of a core; {cost.reports_per_s:.1f} reports/s, "
            f"{cost.written_per_s:,.0f} B/s written, {cost.read_per_s:,.0f} B/s read, {cost.write_ms:.2f} ms a write",
            flush=True,
        )
    print("\n".join(["", f"beyond {WITHIN:.0%}:", *missed]) if missed else f"\nall within {WITHIN:.0%}")
    return 1 if missed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.peers_live", description=__doc__)
    parser.add_argument("--trace", default="art-chat-apr5")
    parser.add_argument("--limit", type=int, default=400)
    parser.add_argument("--time-scale", type=float, default=1.0)
    parser.add_argument("--max-input", type=int, default=12_000)
    parser.add_argument("--max-output", type=int, default=128)
    parser.add_argument("--routers", type=int, default=4)
    parser.add_argument("--sharing", action="append", choices=SHARINGS)
    return parser.parse_args()


def _live(
    requests: Sequence[TraceRequest], group: RouterGroup, time_scale: float, folder: Path
) -> tuple[Figures, Cost]:
    feed = _feed(requests)
    with ExitStack() as stack:
        store = stack.enter_context(server.running(folder)).url if group.sharing == "store" else None
        routers = stack.enter_context(running(folder, [store] * group.count))
        before = [router.cpu_s() for router in routers]
        records = asyncio.run(
            drive(requests, routers, lambda number: group.router_of(feed[number], seed=0), time_scale=time_scale)
        )
        lasted_s = max(record.sent_s + (record.e2e_s or 0.0) for record in records)
        cpu_s = mean(router.cpu_s() - used for router, used in zip(routers, before, strict=True))
        cost = asyncio.run(_cost(routers, cpu_s / lasted_s, lasted_s))
    return _figures(records), cost


async def _cost(routers: Sequence[Router], cpu_share: float, lasted_s: float) -> Cost:
    async with httpx.AsyncClient() as http:

        async def per_s(series: str) -> float:
            return mean([await router.metric(http, series) for router in routers]) / lasted_s

        reports = await per_s('gorgo_peer_reports_total{result="written"}')
        return Cost(
            cpu_share,
            reports,
            await per_s('gorgo_peer_bytes_total{way="written"}'),
            await per_s('gorgo_peer_bytes_total{way="read"}'),
            await per_s("gorgo_peer_write_seconds_total") / reports * 1e3 if reports else 0.0,
        )


def _feed(requests: Sequence[TraceRequest]) -> Sequence[SimRequest]:
    """Return the requests as routers see them: engine and router find prefixes by text, in blocks of this size."""
    return fingerprinted(requests, model=MODEL, key=0, block_bytes=BLOCK_BYTES)


def _simulated(
    requests: Sequence[TraceRequest], group: RouterGroup, time_scale: float, folder: Path, *, seed: int
) -> Figures:
    path = folder / "simulated.yaml"
    path.write_text(yaml.safe_dump(configuration({}, store=None), sort_keys=False))
    config = load_config(path)
    run = run_once(
        SimJob(
            trace="slice",
            feed=_feed(requests),
            policy="gorgo-ms",
            fleet=fleet_of(config, source=path),
            time_scale=time_scale,
            block_tokens=BLOCK_BYTES // BYTES_PER_TOKEN,
            limits=limits_of(config),
            probe_interval_s=config.proxy.probe_interval_s,
            scrape_interval_s=config.proxy.scrape_interval_s,
            keep_requests=True,
            routers=group,
            seed=seed,
        )
    )
    assert run.requests is not None, "they were to be kept"
    return _figures(run.requests)


def _mean(runs: Sequence[Figures]) -> Figures:
    names = ("hit", "ttft_ms_p95", "e2e_s_p95")
    return replace(runs[0], **{name: mean(getattr(run, name) for run in runs) for name in names})


def _figures(records: Sequence[ReplayRecord] | Sequence[SimRecord]) -> Figures:
    cached = sum(record.cached_tokens or 0 for record in records)
    return Figures(
        requests=len(records),
        failed=sum(record.error is not None for record in records),
        hit=cached / sum(record.input_tokens for record in records),
        ttft_ms_p95=_p95(record.ttft_ms for record in records),
        e2e_s_p95=_p95(record.e2e_s for record in records),
    )


def _p95(values: Iterable[float | None]) -> float:
    known = sorted(value for value in values if value is not None)
    return known[min(len(known) - 1, int(0.95 * len(known)))]


def _show(sharing: str, kind: str, found: Figures) -> None:
    row = f"{found.failed:6d} {found.hit:7.2%} {found.ttft_ms_p95:12.0f} {found.e2e_s_p95:10.2f}"
    print(f"{sharing:8} {kind:9} {row}", flush=True)


def _compare(sharing: str, live: Figures, virtual: Figures) -> Iterable[str]:
    if live.failed:
        yield f"{sharing}: {live.failed} live requests failed"
    for name in ("hit", "ttft_ms_p95", "e2e_s_p95"):
        ratio = getattr(live, name) / getattr(virtual, name)
        if abs(ratio - 1.0) > WITHIN:
            yield f"{sharing}: {name} live / simulated {ratio:.3f}"


if __name__ == "__main__":
    sys.exit(main())
