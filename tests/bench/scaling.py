"""A made-up day in virtual time, with a fleet that follows `gorgo_replicas_wanted`, an autoscaler, or nobody.

24 hours of chats about long documents (0.45 a second in the mean, 0.9 in the afternoon, 1.1 in a surge of 24 minutes
that nothing announces), engines of `1xL20-Llama-3.1-8B`, and start-ups of four minutes. A first token is wanted within
8 s. `GORGO_BENCH_SHORT=1` runs three hours. `python -m tests.bench.scaling day` prints the rows of a seed as JSON, and
`... join` those of one replica that joins a fleet with hot system prompts, cold and warmed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from itertools import product
from pathlib import Path
from statistics import fmean

import numpy as np

from gorgo.config.atomic import PUBLIC, write_atomically
from gorgo.core.fleet.replica import ReplicaSpec
from gorgo.core.limits import OverloadLimits, RouterLimits
from gorgo.core.scaling import ScalingLimits
from gorgo.lab.datasets import GroupsShape
from gorgo.lab.datasets.catalogue import generate_requests
from gorgo.lab.sim.engine.profiles import find_profile
from gorgo.lab.sim.fleet import SimFleet, SimReplica, with_accurate_priors
from gorgo.lab.sim.network import Link
from gorgo.lab.sim.workload import SimRequest
from gorgo.lab.simulate.feed import feed_of
from gorgo.lab.simulate.run import rare_collections
from tests.lab.simulate.elastic import (
    DAY_S,
    ElasticRun,
    PodAutoscaler,
    PredictedAttainment,
    ScalingRule,
    Static,
    Utilisation,
    queue_length,
    run_elastic,
    through_the_day,
)

TTFT_S, SHARE, STARTUP_S, MOST = 8.0, 0.95, 240.0, 16
PROFILE = "1xL20-Llama-3.1-8B"
RATE_PER_S = 0.45
SHAPE = GroupsShape(
    seed=0,
    duration_s=DAY_S,
    rate_per_s=RATE_PER_S,
    groups=60,
    users=6000,
    system_median=6000,
    system_sigma=0.35,
    history_median=8000,
    history_sigma=0.5,
    turns_mean=1.5,
    turn_median=400,
    turn_sigma=1.0,
    think_s_min=5.0,
    output_median=150,
    output_sigma=1.0,
    output_max=2048,
    input_max=20_000,
)
LIMITS = RouterLimits(overload=OverloadLimits(queue_enabled=True), max_samples=4096, max_decisions=16)


def signal() -> ScalingRule:
    return PredictedAttainment(ScalingLimits(ttft_s=TTFT_S, share=SHARE, startup_s=STARTUP_S, max_replicas=MOST))


def utilisation(target: float) -> Callable[[], ScalingRule]:
    return lambda: PodAutoscaler(Utilisation(), target, most=MOST)


def queue(target: float) -> Callable[[], ScalingRule]:
    return lambda: PodAutoscaler(queue_length, target, most=MOST)


def static(count: int) -> Callable[[], ScalingRule]:
    return lambda: Static(count)


#: Each row's rule, and the replicas at the start.
ROWS: Mapping[str, tuple[Callable[[], ScalingRule], int]] = {
    "gorgo_replicas_wanted": (signal, 8),
    **{f"HPA, utilisation {target:g}": (utilisation(target), 8) for target in (0.6, 0.9, 0.95)},
    "HPA, queue 0.5": (queue(0.5), 8),
    **{f"static {count}": (static(count), count) for count in (5, 6, 8)},
}
#: Of the picture.
PICTURED = ("gorgo_replicas_wanted", "HPA, utilisation 0.9", "static 6")

#: A herd of eight long system prompts before short questions, on four replicas; a fifth serves after half the time.
HERD = replace(
    SHAPE, duration_s=120.0, groups=8, system_median=8000, system_sigma=0.0, history_median=0, turns_mean=1.0,
    turn_median=100, turn_sigma=0.5, output_median=100,
)  # fmt: skip
HERD_RATES_PER_S, HERD_REPLICAS, JOINS_S = (4.0, 6.0, 8.0), 4, 60.0
WARM_PROMPTS = 8


def feed(*, day_s: float = DAY_S, seed: int = 0) -> Sequence[SimRequest]:
    """Return the day's requests."""
    shape = replace(SHAPE, duration_s=day_s, seed=seed)
    steady = feed_of(generate_requests(shape, block_tokens=shape.block_tokens))
    moved = through_the_day(np.array([one.arrival_s for one in steady]), day_s=day_s).tolist()
    return [replace(one, arrival_s=arrival_s) for one, arrival_s in zip(steady, moved, strict=True)]


def fleet(count: int) -> SimFleet:
    profile = find_profile(PROFILE)
    replicas = (SimReplica(ReplicaSpec(f"eu-{number}", "eu"), profile, Link(rtt_s=0.002)) for number in range(count))
    return with_accurate_priors(SimFleet(tuple(replicas)))


def one(name: str, requests: Sequence[SimRequest], *, seed: int = 0) -> ElasticRun:
    rule, first = ROWS[name]
    most = first if name.startswith("static") else MOST
    # Under an autoscaler by queue length requests wait at the engines, whose own metric it reads.
    limits = replace(LIMITS, overload=OverloadLimits(queue_enabled="queue" not in name))
    with rare_collections():
        return run_elastic(
            name, rule(), fleet(most), requests, first=first, startup_s=STARTUP_S, ttft_s=TTFT_S, limits=limits,
            seed=seed,
        )  # fmt: skip


def join(rate_per_s: float, *, warm_prompts: int, seed: int = 0) -> Mapping[str, float]:
    """Return how many requests a replica that joins serves, and the TTFT of all since the time at which it could."""
    shape = replace(HERD, rate_per_s=rate_per_s, seed=seed)
    requests = feed_of(generate_requests(shape, block_tokens=shape.block_tokens))
    run = run_elastic(
        "a fifth", Static(HERD_REPLICAS + 1), fleet(HERD_REPLICAS + 1), requests, first=HERD_REPLICAS,
        startup_s=JOINS_S, ttft_s=TTFT_S, limits=LIMITS, seed=seed, warm_prompts=warm_prompts,
    )  # fmt: skip
    since = [one for one in run.records if one.scheduled_s >= JOINS_S]
    ttft_ms = [one.ttft_ms for one in since if one.ttft_ms is not None]
    return {
        "rate_per_s": rate_per_s,
        "warm_prompts": warm_prompts,
        "requests": len(since),
        "failed": len(since) - len(ttft_ms),
        "by_the_fifth": sum(one.replica == f"eu-{HERD_REPLICAS}" for one in since),
        "ttft_ms_mean": fmean(ttft_ms),
        "ttft_ms_p95": float(np.percentile(ttft_ms, 95)),
    }


def line(run: ElasticRun) -> str:
    p95 = "-" if run.ttft_ms_p95 is None else f"{run.ttft_ms_p95 / 1e3:.1f}"
    return f"{run.rule:24} {run.attained:>8.2%} {run.mean_replicas:>9.2f} {run.replica_hours:>9.1f} {p95:>7}"


HEAD = f"{'rule':24} {'in time':>8} {'replicas':>9} {'hours':>9} {'p95 s':>7}"


def run() -> None:
    """Run all and print the table."""
    requests = feed(day_s=DAY_S / 8 if os.environ.get("GORGO_BENCH_SHORT") else DAY_S)
    print(HEAD)
    for name in ROWS:
        print(line(one(name, requests)), flush=True)


def plot(path: Path, runs: Sequence[ElasticRun], requests: Sequence[SimRequest]) -> None:
    """Write the picture of the page: the arrivals, and the paid replicas of each run, over the day."""
    import matplotlib as mpl

    from gorgo.lab.report.style import BROAD, RC, panels

    image = BytesIO()
    with mpl.rc_context(RC):
        figure, (load, fleets) = panels(2, BROAD)
        hours = np.array([one.arrival_s for one in requests]) / 3600.0
        counts, edges = np.histogram(hours, bins=24 * 6)
        load.stairs(counts / 600.0, edges, color="#0072B2", fill=True, alpha=0.5)
        load.set_title("requests per second")
        colours = ("#D55E00", "#0072B2", "#009E73", "#999999")
        for row, colour in zip(reversed(runs), reversed(colours[: len(runs)]), strict=True):
            times = [at_s / 3600.0 for at_s, _ in row.paid] + [24.0]
            label = f"{row.rule}: {row.attained:.1%} in time, {row.mean_replicas:.2f} replicas"
            fleets.stairs([count for _, count in row.paid], times, baseline=None, color=colour, label=label)
        fleets.set_title("replicas paid for")
        fleets.set_ylim(0, MOST)  # the legend is above the lines
        fleets.legend(loc="upper left", fontsize=6)
        for panel in (load, fleets):
            panel.set_xlabel("hour of the day")
            panel.set_xlim(0, 24)
        figure.savefig(image, format="svg", metadata={"Date": None})
    write_atomically(path, image.getvalue(), mode=PUBLIC)


def main() -> None:
    """Print rows as JSON, and write the picture of the page."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.scaling", description=__doc__)
    parser.add_argument("what", choices=("day", "join"))
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ROWS)}; all of them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--picture", type=Path, help=f"of {', '.join(PICTURED)}")
    asked = parser.parse_args()
    if asked.what == "join":
        pairs = product(HERD_RATES_PER_S, (0, WARM_PROMPTS))
        print(json.dumps([join(rate, warm_prompts=prompts, seed=asked.seed) for rate, prompts in pairs]))
        return
    requests = feed(seed=asked.seed)
    runs = []
    for name in asked.names or ROWS:
        runs.append(one(name, requests, seed=asked.seed))
        print(line(runs[-1]), file=sys.stderr, flush=True)
    if asked.picture is not None:
        plot(asked.picture, [run for name in PICTURED for run in runs if run.rule == name], requests)
    figures = ("rule", "attained", "mean_replicas", "replica_hours", "ttft_ms_p95")
    print(json.dumps([{"requests": len(requests)} | {name: getattr(run, name) for name in figures} for run in runs]))


if __name__ == "__main__":
    main()
