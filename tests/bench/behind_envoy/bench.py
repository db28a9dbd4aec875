"""Runs the benchmark of pickers behind Envoy and prints its tables.

1. Price: one Envoy without filters, with a picker, and `gorgo serve`, in interleaved rounds.
2. Live streams at 50 events a second each: how many come in time.
3. 100 endpoints: one, two and four pickers behind one Envoy.
4. Calls replayed at pickers without an Envoy: decisions of a core.

Envoy and pickers have core 1, engine and load core 0.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.bench.behind_envoy import report, targets
from tests.bench.behind_envoy.report import Replayed
from tests.bench.relay import bench, measure, scenarios
from tests.bench.relay.report import DIRECT
from tests.bench.relay.targets import Launch, Place, UnavailableError, start, stop
from tests.ports import free_port

_LIVE_GAP_MS, _LIVE_S = 20, 2.0
#: Streams of a live run begin in steps: what a storm of requests costs is no matter of streams.
_OPEN_S, _MOST_WAITING = 40.0, 50
_LIVE_RELAYS = (DIRECT, targets.PLAIN, "picker")
_ENDPOINTS = 100
_ENDLESS = 100_000
_START_S, _REPLAY_S_MAX = 120.0, 180.0
_ROOT = Path(__file__).parents[3]


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    rounds: int
    #: Factor on the length of each job.
    scale: float
    jobs: tuple[str, ...]
    live: tuple[int, ...]
    counts: tuple[int, ...] = (1, 2, 4)
    #: Of replayed calls that arrive by chance, 1/s.
    rate: float = 300.0
    counted: tuple[str, ...] = tuple(targets.COUNTED)
    pairs: int = 2


#: Nine minutes, and two and a half.
FULL = Plan(3, 1.0, ("requests_small", "requests_large", "ttft_small", "streams", "events"), (250, 500, 1000, 2000))
SHORT = Plan(1, 0.4, ("requests_small", "ttft_small", "streams", "events"), (1000, 2000), pairs=1)
#: Everything once, to see that it runs.
BRIEF = replace(SHORT, scale=0.2, live=(50,), counts=(1,), counted=("picker",))


def run(plan: Plan, *, as_json: bool = False) -> None:
    """Measure and print everything."""
    started_s = time.monotonic()
    about: dict[str, Any] = {"machine": measure.describe_machine(), "commit": bench.commit_here()}
    print(f"Pickers behind Envoy\n{about['machine']}\ncommit {about['commit']}", file=sys.stderr, flush=True)
    found = measured(plan)
    about["seconds"] = round(time.monotonic() - started_s)
    if as_json:
        print(json.dumps(about | found))
        return
    print(f"commit {about['commit']}, {about['machine']}; took {about['seconds']} s; {plan.rounds} rounds, medians")
    print("", report.table(found["price"]), "", report.live_table(found["live"]), sep="\n")
    print(f"\n{_ENDPOINTS} endpoints", report.table(found["endpoints"]), "", sep="\n")
    print(report.replayed_table(found["replayed"]), *found["notes"], sep="\n")


def measured(plan: Plan) -> dict[str, Any]:
    """Return the figures of all four parts, and what went wrong."""
    price, endpoints = dict[tuple[str, str, int], Any](), dict[tuple[str, str, int], Any]()
    price.update(interleaved(plan, plan.rounds, targets.PRICED, plan.jobs, live=plan.live))
    jobs, notes = ("requests_small", "ttft_small"), list[str]()
    for name in plan.counted:
        pair = {targets.PLAIN: targets.plain, name: targets.COUNTED[name]}
        for (relay, job, number), run in interleaved(plan, plan.pairs, pair, jobs, replicas=_ENDPOINTS):
            # The plain Envoy of each pair is another run.
            at = number + plan.pairs * plan.counted.index(name)
            endpoints[relay, job, at] = run
    replayed: list[Replayed] = []
    try:
        replayed.extend(_replayed(plan))
    except (UnavailableError, subprocess.TimeoutExpired) as why:
        notes.append(f"replayed calls: {why}")
    return {
        "price": report.figures(price),
        "live": report.live_rows(price, plan.live, 1000 // _LIVE_GAP_MS),
        "endpoints": report.figures(endpoints),
        "replayed": report.replayed_rows(replayed),
        "notes": [*notes, *report.faults(price), *report.faults(endpoints)],
    }


def interleaved(
    plan: Plan,
    rounds: int,
    launches: Mapping[str, Any],
    jobs: tuple[str, ...],
    *,
    replicas: int = bench.REPLICAS,
    live: tuple[int, ...] = (),
) -> Iterator[tuple[tuple[str, str, int], Mapping[str, Any]]]:
    """Yield the figures of rounds, of which every other one visits the relays the other way round."""
    every = scenarios.each_round(scenarios.Plan(rounds, plan.scale, only=jobs))
    with bench.running(launches, replicas=replicas) as (relays, load):
        for number in range(rounds):
            order = relays if number % 2 == 0 else relays[::-1]
            for scenario in every:
                for relay in order:
                    if scenario.direct or relay.process is not None:
                        yield (relay.name, scenario.name, number), load(relay, scenario)
            for count in live:
                for relay in order:
                    if relay.name in _LIVE_RELAYS:
                        yield (relay.name, report.live_name(count), number), load(relay, _live(count, plan.scale))
            print(f"round {number + 1} of {rounds}, {replicas} replicas", file=sys.stderr, flush=True)


def _live(count: int, scale: float) -> scenarios.Scenario:
    job = {"kind": "hold", "size": scenarios.SMALL, "tokens": _ENDLESS, "gap_ms": _LIVE_GAP_MS, "connections": count}
    job |= {"seconds": _LIVE_S * scale, "open_s": _OPEN_S, "most_waiting": _MOST_WAITING}
    return scenarios.Scenario(name=report.live_name(count), job=job)


def _replayed(plan: Plan) -> Iterator[Replayed]:
    """Yield the figures of calls without an Envoy, each number of pickers on one core."""
    with bench.harness(_ENDPOINTS) as (ports, _):
        for count in plan.counts:
            with ExitStack() as stack:
                pickers = [_picker(stack, ports) for _ in range(count)]
                for rate in (None, plan.rate):
                    yield Replayed(count, rate, _replay(pickers, rate, 4.0 * plan.scale))


def _picker(stack: ExitStack, replicas: list[int]) -> tuple[int, int]:
    """Return port and process of a picker that listens."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gorgo-bench-picker-")))
    port = free_port()
    place = Place(port=free_port(), replicas=replicas, folder=folder)
    command = targets.picker_command(targets.write_config(place, bind_port=port))
    with measure.on_relay_core():
        process = start(Launch(arguments=command, environment={}, version="", tree=_ROOT), folder)
    stack.callback(stop, process)
    until_s = time.monotonic() + _START_S
    while "listening" not in (folder / "log").read_text(errors="replace"):
        if process.poll() is not None or time.monotonic() > until_s:
            raise UnavailableError((folder / "log").read_text(errors="replace")[-500:])
        time.sleep(0.05)
    return port, process.pid


def _replay(pickers: list[tuple[int, int]], rate: float | None, seconds: float) -> Mapping[str, Any]:
    command = [sys.executable, "-m", "tests.bench.behind_envoy.replay", *(str(port) for port, _ in pickers)]
    for _, process in pickers:
        command += ["--process", str(process)]
    command += ["--seconds", f"{seconds:g}", *([] if rate is None else ["--rate", f"{rate:g}"])]
    with measure.on_load_core():
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=_REPLAY_S_MAX, cwd=_ROOT)
    found: Mapping[str, Any] = json.loads(done.stdout)
    return found
