"""Processor time of a simulated run, per request and policy: a window like ART-Chat's at two loads, and a large fleet.

The requests are read before; the rest of a run counts, its result row included. Rows of one fleet are measured in turn,
so that what else the machine does meets all of them.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, islice
from statistics import median

from gorgo.cli.options import REGIONS_YAML
from gorgo.config.load import load_config
from gorgo.lab.sim.fleet import SimFleet, fleet_of, limits_of, with_accurate_priors
from gorgo.lab.simulate.job import SimJob
from gorgo.lab.simulate.run import run_once
from gorgo.lab.traces import TraceFilters

TRACE = "art-chat-apr7"
POLICIES = ("gorgo-ms", "gorgo", "random")
#: Replicas, and time scale: those of regions.yaml, and each many times, at half of the load per replica.
FLEETS = ((3, 1.0), (3, 3.0), (512, 2.0 * 3 / 512))
#: Of the window, and runs of each row.
REQUESTS, ROUNDS = 2000, 5


def run() -> None:
    """Print the median and the least processor time per request in microseconds."""
    print(f"simulated run, {REQUESTS:,} requests of {TRACE}, us of processor time per request; {ROUNDS} runs a row")
    print(f"{'policy':<12}  {'replicas':>8}  {'time scale':>10}  {'p50':>7}  {'least':>7}")
    for replicas, time_scale in FLEETS:
        rows = [(_job(policy, replicas, time_scale), list[float]()) for policy in POLICIES]
        for _ in range(1 + ROUNDS):  # the first one reads the requests
            for job, spent_us in rows:
                found = run_once(job)
                assert found.cpu_s is not None
                spent_us.append(1e6 * found.cpu_s / found.row.n)
        for job, spent_us in rows:
            p50, least = median(spent_us[1:]), min(spent_us[1:])
            print(f"{job.policy:<12}  {replicas:>8}  {time_scale:>10.3g}  {p50:>7.1f}  {least:>7.1f}")


def _job(policy: str, replicas: int, time_scale: float) -> SimJob:
    config = load_config(REGIONS_YAML)
    fleet = with_accurate_priors(fleet_of(config, source=REGIONS_YAML))
    if replicas > len(fleet.replicas):
        repeated = enumerate(islice(cycle(fleet.replicas), replicas))
        fleet = SimFleet([replace(each, spec=replace(each.spec, name=f"{number}")) for number, each in repeated])
    return SimJob(
        trace=TRACE,
        policy=policy,
        fleet=fleet,
        limits=limits_of(config),
        filters=TraceFilters(max_input=24_000, max_output=128, limit=REQUESTS),
        time_scale=time_scale,
    )
