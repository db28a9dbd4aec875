"""A made-up day in virtual time, with a fleet that follows `gorgo_replicas_wanted`, an autoscaler, or nobody.

24 hours of chats about long documents (0.45 a second in the mean, 0.9 in the afternoon, 1.1 in a surge of 24 minutes
that nothing announces), engines of `1xL20-Llama-3.1-8B`, and start-ups of four minutes. A first token is wanted within
8 s. `GORGO_BENCH_SHORT=1` runs three hours, and `python -m tests.bench.scaling FOLDER SEEDS NAME ...` some rows of the
whole day and prints them as JSON, with a file of each for the plot; a row takes a minute of a processor, and one whose
file is there already is not run again.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from gorgo.config.atomic import PUBLIC, write_atomically
from gorgo.core.fleet.replica import ReplicaSpec
from gorgo.core.limits import OverloadLimits, RouterLimits
from gorgo.core.scaling import ScalingLimits
from gorgo.lab.datasets import GroupsShape
from gorgo.lab.datasets.catalogue import generate_requests
from gorgo.lab.sim.engine.profiles import find_profile
from gorgo.lab.sim.faults.scenarios import with_accurate_priors
from gorgo.lab.sim.fleet import SimFleet, SimReplica
from gorgo.lab.sim.network import Link
from gorgo.lab.sim.workload import SimRequest
from gorgo.lab.simulate.feed import feed_of
from gorgo.lab.simulate.rows import rare_collections
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
    **{f"HPA, utilisation {target:g}": (utilisation(target), 8) for target in (0.6, 0.7, 0.8, 0.9, 0.95)},
    **{f"HPA, queue {target:g}": (queue(target), 8) for target in (0.1, 0.5, 1.0)},
    **{f"static {count}": (static(count), count) for count in (5, 6, 7, 8)},
}
#: The signal again, where a replica that joins is warmed with so many prompts.
WARMED, WARM_PROMPTS = "gorgo_replicas_wanted, warmed", 8


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
    warmed = name == WARMED
    rule, first = ROWS["gorgo_replicas_wanted" if warmed else name]
    most = first if name.startswith("static") else MOST
    # Under an autoscaler by queue length requests wait at the engines, whose own metric it reads.
    limits = replace(LIMITS, overload=OverloadLimits(queue_enabled="queue" not in name))
    with rare_collections():
        return run_elastic(
            name,
            rule(),
            fleet(most),
            requests,
            first=first,
            startup_s=STARTUP_S,
            ttft_s=TTFT_S,
            limits=limits,
            seed=seed,
            warm_prompts=WARM_PROMPTS if warmed else 0,
        )


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


def plot(path: Path, runs: Sequence[Mapping[str, Any]], requests: Sequence[SimRequest]) -> None:
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
            times = [at_s / 3600.0 for at_s, _ in row["paid"]] + [24.0]
            label = f"{row['rule']}: {row['attained']:.1%} in time, {row['mean_replicas']:.2f} replicas"
            fleets.stairs([count for _, count in row["paid"]], times, baseline=None, color=colour, label=label)
        fleets.set_title("replicas paid for")
        fleets.set_ylim(0, MOST)  # the legend is above the lines
        fleets.legend(loc="upper left", fontsize=6)
        for panel in (load, fleets):
            panel.set_xlabel("hour of the day")
            panel.set_xlim(0, 24)
        figure.savefig(image, format="svg", metadata={"Date": None})
    write_atomically(path, image.getvalue(), mode=PUBLIC)


def main(folder: Path, seeds: int, names: Sequence[str]) -> None:
    """Run some rows, each with a file, and print them all."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for seed in range(seeds):
        requests = feed(seed=seed)
        for name in names:
            path = folder / f"{name.replace(' ', '-').replace(',', '')}-{seed}.json"
            if not path.exists():
                found = one(name, requests, seed=seed)
                print(seed, line(found), file=sys.stderr, flush=True)
                path.write_text(json.dumps(asdict(replace(found, records=()))))
            run = json.loads(path.read_bytes())
            figures = ("rule", "attained", "mean_replicas", "replica_hours", "ttft_ms_p95")
            rows.append({"seed": seed, "requests": len(requests)} | {name: run[name] for name in figures})
    print(json.dumps(rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
