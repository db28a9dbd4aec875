"""How many requests meet an objective for their end while a replica dies, by what becomes of broken answers.

Virtual time: 2,000 requests of an ART-Chat-like window on the fleet of regions.yaml, `gorgo-ms`, five seeds, the
scenario `killed`, at three loads. With `limits.continuations` 0 an answer whose replica dies ends in an error, which
meets no objective, unless its client sends the request again at once; with 2, the default, it goes on elsewhere.
`GORGO_BENCH_SHORT=1` runs one seed of 600 requests.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from joblib import Parallel, delayed

from gorgo.config.load import load_config
from gorgo.lab.datasets import load_requests
from gorgo.lab.sim.fleet import fleet_of, limits_of
from gorgo.lab.sim.records import SimRecord
from gorgo.lab.sim.workload import BLOCK_TOKENS, SimRequest
from gorgo.lab.simulate import SimJob, run_once
from gorgo.lab.simulate.feed import feed_of
from gorgo.lab.traces import TraceFilters
from tests.bench.overload_lateness import CONFIG, TRACE

LOADS = (0.5, 0.8, 1.0)
ERROR, AGAIN, CONTINUED = WAYS = ("an error", "sent again", "continued")
SEEDS, REQUESTS = 5, 2000
#: The objective, s: twice the p95 of a run at load 1 in which nothing goes wrong.
SLO_E2E_S = 30.0


def run() -> None:
    """Run all and print the table; some minutes on two cores."""
    quick = bool(os.environ.get("GORGO_BENCH_SHORT"))
    seeds, requests = (1, 600) if quick else (SEEDS, REQUESTS)
    places = [(load, way, seed) for load in LOADS for way in WAYS for seed in range(seeds)]
    runs = Parallel(n_jobs=-1)(delayed(one)(*place, requests=requests) for place in places)
    found = dict(zip(places, runs, strict=True))
    print(f"share of requests with a whole answer within {SLO_E2E_S:g} s, simulated")
    print(f"{'load':4} {'broken answers':14} {'of all':>8} {'broken':>7} {'of these':>9}")
    for load in LOADS:
        for way in WAYS:
            print(line(load, way, [ended for seed in range(seeds) for ended in found[load, way, seed]]))


def one(load: float, way: str, seed: int, *, requests: int) -> Sequence[Ended]:
    """One run, in whichever process."""
    rows = load_requests(TRACE, TraceFilters(limit=requests, seed=seed), seed=seed, block_tokens=BLOCK_TOKENS)
    feed = tuple(feed_of(rows, block_tokens=BLOCK_TOKENS))
    first = _records(feed, load, seed, continuations=2 if way == CONTINUED else 0)
    broken = [record for record in first if record.continued or (record.error and record.ttft_ms is not None)]
    if way != AGAIN:
        return [Ended(_whole_s(record), record in broken) for record in first]
    # Nothing before the death depends on what comes after it, so the same answers break.
    again = {
        record.id: replace(feed[int(record.id)], index=len(feed) + number, arrival_s=_end_s(record) * load)
        for number, record in enumerate(broken)
    }
    longer = sorted([*feed, *again.values()], key=lambda request: request.arrival_s)
    second = {record.id: record for record in _records(longer, load, seed, continuations=0)}
    ended = []
    for request in feed:
        record = second[str(request.index)]
        sent_again = again.get(record.id)
        if sent_again is None:
            ended.append(Ended(_whole_s(record), False))
            continue
        last = second[str(sent_again.index)]
        ended.append(Ended(_end_s(last) - record.scheduled_s if last.error is None else inf, True))
    return ended


@dataclass(frozen=True, slots=True)
class Ended:
    """When a request had its whole answer, s; infinite without. Whether its replica died behind its first token."""

    e2e_s: float
    broke: bool


def line(load: float, way: str, ended: Sequence[Ended]) -> str:
    """The shares of all runs together."""
    broken = [each for each in ended if each.broke]
    of_broken = f"{_share(broken):>9.2%}" if broken else f"{'-':>9}"
    return f"{load:<4g} {way:14} {_share(ended):>8.2%} {len(broken):>7} {of_broken}"


def _records(feed: Sequence[SimRequest], load: float, seed: int, *, continuations: int) -> Sequence[SimRecord]:
    config = load_config(CONFIG)
    job = SimJob(
        trace=TRACE,
        feed=feed,
        policy="gorgo-ms",
        fleet=fleet_of(config, source=CONFIG),
        time_scale=1 / load,
        scenario="killed",
        seed=seed,
        limits=replace(limits_of(config), continuations=continuations),
        keep_requests=True,
    )
    return run_once(job).requests or ()


def _whole_s(record: SimRecord) -> float:
    return _end_s(record) - record.scheduled_s if record.error is None else inf


def _end_s(record: SimRecord) -> float:
    assert record.e2e_s is not None, "every request ends"
    return record.scheduled_s + record.e2e_s


def _share(ended: Sequence[Ended]) -> float:
    return sum([each.e2e_s <= SLO_E2E_S for each in ended]) / len(ended)
