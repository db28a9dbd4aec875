"""`python -m tests.bench.relay.processes [--processes N ...] [--rounds N] [--visits N]`: rates by processes.

The relays may use all cores; engine and load share core 0 with them, as on a machine where the load comes from a third
party. Each round starts `gorgo serve` with each number of processes, and sglang-router with as many threads as it
likes, and lets the load visit them in turn; every other round in the opposite order.

Where engine and load leave too little of core 0, the second process cannot use it. So beside the ratio of requests a
second (`measured`) there is the one of cores for the relays alone (`by CPU`): `N` cores of processor time, divided by
what a request costs at that load. With `--connections` each process has so many, so that a request is compared at the
same load of its process.

Two routers that know nothing of each other, each with every other connection, take part as the control: half the
connections are fewer events for each wake-up, and two programs share caches. What sharing costs is a ratio over them.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from tests.bench.relay import bench, measure, scenarios, targets
from tests.bench.training_beside import median_ratio
from tests.ports import free_port

_ANSWER_TOKENS = 128
#: Of the streams that are held open: as many as one process carries at most on a core.
_STREAMS = 800
_START_S = 60.0
APART = "two apart"
Figures = Mapping[str, Any]


def jobs(seconds: float, streams: int) -> list[scenarios.Scenario]:
    """Return what is measured: small and large requests without a pause, and open streams at 100 events a second."""
    closed = {"kind": "closed", "seconds": seconds, "stream": False, "tokens": _ANSWER_TOKENS}
    held = {"kind": "hold", "open_s": 60.0, "size": scenarios.SMALL, "tokens": scenarios.ENDLESS, "gap_ms": 10}
    return [
        scenarios.Scenario(name="small requests", job={**closed, "size": scenarios.SMALL, "connections": 64}),
        scenarios.Scenario(name="requests of 90 kB", job={**closed, "size": scenarios.LARGE, "connections": 32}),
        scenarios.Scenario(name="events of streams", job={**held, "connections": streams, "seconds": seconds}),
    ]


def gorgo(processes: int) -> Callable[[targets.Place], targets.Launch]:
    """Return the launch of `gorgo serve` with so many processes."""

    def launch(place: targets.Place) -> targets.Launch:
        found = targets.gorgo(place)
        return replace(found, arguments=[*found.arguments, "--processes", str(processes)])

    return launch


def two_apart(place: targets.Place) -> targets.Launch:
    """Return the launch of two `gorgo serve` that know nothing of each other: what the machine takes of a ratio."""
    found = []
    for name in ("one", "other"):
        folder = place.folder / name
        folder.mkdir()
        found.append(targets.Place(port=free_port(), replicas=place.replicas, folder=folder))
    one, other = map(targets.gorgo, found)
    both = f"trap 'kill 0' TERM; {shlex.join(one.arguments)} & {shlex.join(other.arguments)} & wait"
    return replace(one, arguments=["bash", "-c", both], port=found[0].port, second_port=found[1].port)


def per_process(job: scenarios.Scenario, connections: int | None, relay: str) -> scenarios.Scenario:
    """Return the job with so many connections for each process of a relay; held streams stay as they are."""
    if connections is None or job.job["kind"] == "hold":
        return job
    return replace(job, job={**job.job, "connections": connections * _processes_of(relay)})


def _processes_of(relay: str) -> int:
    return 2 if relay == APART else int(relay.split()[1]) if relay.startswith("gorgo ") else 1


def run(
    processes: Sequence[int], rounds: int, visits: int, seconds: float, streams: int, connections: int | None = None
) -> None:
    """Measure and print."""
    planned = jobs(seconds, streams)
    print(f"Requests a second by processes; engine and load on core 0\n{measure.describe_machine()}", flush=True)
    print(f"commit {bench.commit_here()}", flush=True)
    launches = {f"gorgo {count}": gorgo(count) for count in processes}
    launches |= {APART: two_apart, "sglang-router": targets.sglang_router}
    found: dict[tuple[str, str], list[Figures]] = {}
    with bench.harness() as (ports, load):
        for number in range(rounds):
            with _started(launches, ports, load) as relays:
                for visit, job in product(range(visits), planned):
                    for relay in relays if (number + visit) % 2 == 0 else relays[::-1]:
                        figures = load(relay, per_process(job, connections, relay.name))
                        found.setdefault((relay.name, job.name), []).append(figures)
                        if figures["bad"]:
                            print(f"{relay.name}, {job.name}: {figures['bad']} bad ({figures['problem']})", flush=True)
            print(f"round {number + 1} of {rounds}, load average {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
    for job in planned:
        print(f"\n{job.name}")
        names = [name for name in launches if (name, job.name) in found]
        for name in names:
            print(_row(name, found[name, job.name], found[f"gorgo {processes[0]}", job.name], name != names[0]))


@contextmanager
def _started(launches: Mapping[str, Any], ports: list[int], load: bench.Load) -> Iterator[list[bench.Relay]]:
    with ExitStack() as stack:
        relays = []
        for name, launch in launches.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gorgo-bench-")))
            place = targets.Place(port=free_port(), replicas=ports, folder=folder)
            try:
                made = launch(place)
            except targets.UnavailableError as why:
                print(f"SKIPPED {name}: {why}", file=sys.stderr, flush=True)
                continue
            process = targets.start(made, folder)
            stack.callback(targets.stop, process)
            port = place.port if made.port is None else made.port
            relay = bench.Relay(name, port, process.pid, made.version, made.tls, made.second_port)
            _wait_until_answering(relay, load)
            relays.append(relay)
        yield relays


def _wait_until_answering(relay: bench.Relay, load: bench.Load) -> None:
    job = {"kind": "closed", "seconds": 0.5, "size": scenarios.SMALL, "tokens": 1, "connections": 8}
    until_s = time.monotonic() + _START_S
    while not (figures := load(relay, scenarios.Scenario(name="warm-up", job=job)))["requests"]:
        if time.monotonic() > until_s:
            raise SystemExit(f"{relay.name} does not answer: {figures['problem']}")
        time.sleep(0.2)


def per_s(figures: Figures) -> float:
    """Return events, or requests, a second."""
    return _done(figures) / float(figures["wall_s"])


def per_cpu_s(figures: Figures) -> float:
    """Return events, or requests, for each second of the relay's processor time."""
    return _done(figures) / float(figures["cpu_s"])


def _done(figures: Figures) -> int:
    return int(figures["tokens"] or figures["requests"])


def _row(name: str, runs: Sequence[Figures], base: Sequence[Figures], compared: bool) -> str:
    well = [each for each in runs if _done(each)]
    if not well:
        return f"{name:<14}nothing was answered"
    text = (
        f"{name:<14}{median(map(per_s, well)):>9.0f}/s"
        f"{median(1e6 / per_cpu_s(each) for each in well):>9.1f} us of CPU each"
        f"{median(each['cpu_s'] / each['wall_s'] for each in well):>6.2f} cores"
    )
    if not compared:
        return text
    pairs = [(own, one) for own, one in zip(runs, base, strict=True) if _done(own) and _done(one)]
    cores = _processes_of(name)
    ratios = {
        "measured": [per_s(own) / per_s(one) for own, one in pairs],
        "by CPU": [cores * per_cpu_s(own) / per_cpu_s(one) for own, one in pairs],
    }
    for kind, values in ratios.items():
        value, low, high = median_ratio(np.log(values))
        text += f"   {kind} {value:.2f} [{low:.2f}, {high:.2f}]"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.relay.processes", description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], metavar="N", help="the first is the base")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--visits", type=int, default=1, help="of each relay in a round, for each job")
    parser.add_argument("--streams", type=int, default=_STREAMS, help="that are held open")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each visit")
    parser.add_argument("--connections", type=int, help="of each process, where requests are sent without a pause")
    given = parser.parse_args()
    run(given.processes, given.rounds, given.visits, given.seconds, given.streams, given.connections)


if __name__ == "__main__":
    main()
