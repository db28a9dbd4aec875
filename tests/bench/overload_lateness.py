"""What the overdue clock and hedging bring where replicas freeze or paths are late, and cost where nothing is.

Virtual time: 4,000 requests of an ART-Chat-like window at time scale 1 on the fleet of regions.yaml, `gorgo-ms`, five
seeds. The clock, which makes a replica whose first token is overdue count as busy, has no switch in the configuration:
it is off here by an infinite `STUCK_AFTER_S`. `GORGO_BENCH_SHORT=1` runs one seed of 1,000 requests.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import exp, inf, log
from pathlib import Path
from unittest.mock import patch

from joblib import Parallel, delayed

from gorgo.config.load import load_config
from gorgo.core.fleet import request_filter
from gorgo.core.latency import prefill, ttft
from gorgo.core.limits import HedgeLimits
from gorgo.lab.sim.fleet import fleet_of, limits_of
from gorgo.lab.simulate import SimJob, SimulatedRun, run_once
from gorgo.lab.traces import TraceFilters
from gorgo.policies import gorgo_ms

CONFIG = Path(__file__).parents[2] / "regions.yaml"
TRACE = "art-chat-apr5"
SCENARIOS = ("freezing", "late-path", "steady")
SEEDS, REQUESTS = 5, 4000
#: Every module that has taken the constant by its name.
_CLOCKED = (prefill, request_filter, ttft, gorgo_ms)


@dataclass(frozen=True, slots=True)
class Way:
    """What is on."""

    name: str
    clock: bool
    hedging: bool


WAYS = (Way("neither", False, False), Way("overdue clock", True, False), Way("clock and hedging", True, True))


def run() -> None:
    """Run all and print the table; quarter of an hour on two cores."""
    quick = bool(os.environ.get("GORGO_BENCH_SHORT"))
    seeds, requests = (1, 1000) if quick else (SEEDS, REQUESTS)
    places = [(scenario, way, seed) for scenario in SCENARIOS for way in WAYS for seed in range(seeds)]
    runs = Parallel(n_jobs=-1)(delayed(one)(*place, requests=requests) for place in places)
    found = dict(zip(places, runs, strict=True))
    print(f"{'scenario':10} {'with':18} {'TTFT p50':>9} {'p95':>14} {'p99':>14} {'E2E p95 s':>13} {'hedged':>7}")
    for scenario in SCENARIOS:
        plain = [found[scenario, WAYS[0], seed] for seed in range(seeds)]
        for way in WAYS:
            print(line(scenario, way, [found[scenario, way, seed] for seed in range(seeds)], plain))


def one(scenario: str, way: Way, seed: int, *, requests: int) -> SimulatedRun:
    """One run, in whichever process."""
    config = load_config(CONFIG)
    limits = limits_of(config)
    if not way.hedging:
        limits = replace(limits, hedging=HedgeLimits(budget_ratio=0.0))
    with ExitStack() as stack:
        for module in () if way.clock else _CLOCKED:
            stack.enter_context(patch.object(module, "STUCK_AFTER_S", inf))
        return run_once(
            SimJob(
                trace=TRACE,
                policy="gorgo-ms",
                fleet=fleet_of(config, source=CONFIG),
                filters=TraceFilters(limit=requests),
                scenario=scenario,
                seed=seed,
                limits=limits,
            )
        )


def line(scenario: str, way: Way, runs: Sequence[SimulatedRun], plain: Sequence[SimulatedRun]) -> str:
    """Means over the seeds, and their geometric mean ratios to what neither gives."""
    ttft = {name: _values(runs, name) for name in ("p50", "p95", "p99")}
    base = {name: _values(plain, name) for name in ttft}
    e2e, e2e_base = ([run.row.e2e_s.p95 or inf for run in of] for of in (runs, plain))
    hedged = [run.goodput.hedged for run in runs if run.goodput is not None]
    return (
        f"{scenario:10} {way.name:18} {_mean(ttft['p50']):>9.0f} {_cell(ttft, base, 'p95'):>14} "
        f"{_cell(ttft, base, 'p99'):>14} {_mean(e2e):>6.2f} ({ratio(e2e, e2e_base):.2f}) {_mean(hedged):>7.2%}"
    )


def ratio(values: Sequence[float], base: Sequence[float]) -> float:
    """Geometric mean of the ratios seed by seed.

    Example
    -------
    >>> round(ratio([2.0, 8.0], [1.0, 1.0]), 3)
    4.0
    """
    return exp(_mean([log(value / other) for value, other in zip(values, base, strict=True)]))


def _values(runs: Sequence[SimulatedRun], name: str) -> list[float]:
    return [getattr(run.row.ttft_ms, name) for run in runs]


def _cell(values: Mapping[str, Sequence[float]], base: Mapping[str, Sequence[float]], name: str) -> str:
    return f"{_mean(values[name]):.0f} ({ratio(values[name], base[name]):.2f})"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
