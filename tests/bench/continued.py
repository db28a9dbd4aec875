"""How many requests meet an objective for their end while a replica dies: with continued answers, and without.

Virtual time: 2,000 requests of an ART-Chat-like window on the fleet of regions.yaml, `gorgo-ms`, five seeds, the
scenario `killed`, at three loads. With `limits.continuations` 0 an answer whose replica dies ends in an error, which
meets no objective; with 2, the default, it goes on elsewhere. `GORGO_BENCH_SHORT=1` runs one seed of 600 requests.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from joblib import Parallel, delayed

from gorgo.config.load import load_config
from gorgo.lab.sim.records import SimRecord
from gorgo.lab.simulate import SimJob, run_once
from gorgo.lab.simulate.fleet import fleet_of, limits_of
from gorgo.lab.traces import TraceFilters
from tests.bench.overload_lateness import CONFIG, TRACE

LOADS, CONTINUATIONS = (0.5, 0.8, 1.0), (0, 2)
SEEDS, REQUESTS = 5, 2000
#: The objective, s: twice the p95 of a run at load 1 in which nothing goes wrong.
SLO_E2E_S = 30.0


def run() -> None:
    """Run all and print the table; some minutes on two cores."""
    quick = bool(os.environ.get("GORGO_BENCH_SHORT"))
    seeds, requests = (1, 600) if quick else (SEEDS, REQUESTS)
    places = [(load, most, seed) for load in LOADS for most in CONTINUATIONS for seed in range(seeds)]
    runs = Parallel(n_jobs=-1)(delayed(one)(*place, requests=requests) for place in places)
    found = dict(zip(places, runs, strict=True))
    print(f"share of requests with a whole answer within {SLO_E2E_S:g} s, simulated")
    print(f"{'load':4} {'continuations':>13} {'of all':>8} {'broken':>7} {'of these':>9}")
    for load in LOADS:
        for most in CONTINUATIONS:
            print(line(load, most, [record for seed in range(seeds) for record in found[load, most, seed]]))


def one(load: float, most: int, seed: int, *, requests: int) -> Sequence[SimRecord]:
    """One run, in whichever process."""
    config = load_config(CONFIG)
    job = SimJob(
        trace=TRACE,
        policy="gorgo-ms",
        fleet=fleet_of(config, source=CONFIG),
        filters=TraceFilters(limit=requests),
        time_scale=1 / load,
        scenario="killed",
        seed=seed,
        limits=replace(limits_of(config), continuations=most),
        keep_requests=True,
    )
    return run_once(job).requests or ()


def line(load: float, most: int, records: Sequence[SimRecord]) -> str:
    """The shares of all runs together; broken are answers whose replica died behind their first token."""
    broken = [record for record in records if record.continued or (record.error and record.ttft_ms is not None)]
    of_broken = f"{_share(broken):>9.2%}" if broken else f"{'-':>9}"
    return f"{load:<4g} {most:>13} {_share(records):>8.2%} {len(broken):>7} {of_broken}"


def _share(records: Sequence[SimRecord]) -> float:
    met = [record.error is None and record.e2e_s is not None and record.e2e_s <= SLO_E2E_S for record in records]
    return sum(met) / len(met)
