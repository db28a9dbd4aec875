"""Runs the benchmark: starts engine and relays, lets the load visit them in turn, prints the table.

Engine and load share core 0, relays have core 1. Every scenario of a round visits every relay before the next begins,
so that what else the machine does meets all alike; every other round visits them in the opposite order, so that what a
visit leaves behind for the next one does too.
"""

from __future__ import annotations

import json
import resource
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.bench.relay import capacity, measure, report, scenarios, targets
from tests.ports import free_port

REPLICAS = 3
_JOB_S_MAX = 90.0
_OPEN_FILES = 16384
#: No round begins that would end later, if it takes as long as the longest one.
_RUN_S_MAX = 960.0
_ROOT = Path(__file__).parents[3]


@dataclass(frozen=True, slots=True)
class Relay:
    """A running target: its port and first process (None: the engine itself, not measured)."""

    name: str
    port: int
    process: int | None
    version: str = ""
    tls: bool = False
    second_port: int | None = None


def run(plan: scenarios.Plan, *, against: str | None = None, others: bool = True, as_json: bool = False) -> None:
    """Measure and print everything; `against` is a tree whose `gorgo serve` takes part, `others` are all relays but
    gorgo without TLS.
    """
    started_s = time.monotonic()
    known = targets.RELAYS if others else {"gorgo": targets.RELAYS["gorgo"]}
    earlier = {f"gorgo {Path(against).name}": targets.other_gorgo(against)} if against else {}
    machine, commit = measure.describe_machine(), commit_here()
    print(f"Relay overhead\n{machine}\ncommit {commit}", file=sys.stderr, flush=True)
    runs, versions = _measured(plan, {**known, **earlier})
    rounds, took_s = len({number for _, _, number in runs}), round(time.monotonic() - started_s)
    about = {"machine": machine, "commit": commit, "rounds": rounds, "seconds": took_s, "versions": versions}
    notes = [*report.faults(runs), *capacity.limits(runs)]
    if as_json:
        print(json.dumps({**about, "measures": report.figures(runs), "notes": notes}))
        return
    print(*(f"{name}: {version}" for name, version in versions.items()), sep="\n")
    print(f"commit {commit}, {machine}")
    print(f"{rounds} rounds, medians; a p99 is about a round's second worst; took {took_s} s\n")
    print(report.table(runs), report.budgets(runs), *notes, sep="\n\n")


@contextmanager
def running(relays: Mapping[str, Any], *, replicas: int = REPLICAS) -> Iterator[tuple[list[Relay], Load]]:
    """Engine, load and relays, started, answering, and stopped at the end; what cannot run is said and left out."""
    with harness(replicas) as (ports, load), _started(relays, ports, load) as found:
        yield found, load


@contextmanager
def harness(replicas: int = REPLICAS) -> Iterator[tuple[list[int], Load]]:
    """Return the engine's ports and the load."""
    _raise_open_files()
    with ExitStack() as stack:
        engine = _start_on_load_core(stack, "engine", str(replicas))
        assert engine.stdout is not None, "it is a pipe"
        ports = [int(port) for port in engine.stdout.readline().split()]
        yield ports, Load(stack)


@contextmanager
def _started(relays: Mapping[str, Any], ports: list[int], load: Load) -> Iterator[list[Relay]]:
    """Relays as new processes, the engine itself first."""
    with ExitStack() as stack:
        found = [Relay(report.DIRECT, ports[0], None)]
        for name, launch in relays.items():
            try:
                found.append(_start_relay(stack, name, launch, ports, load))
            except targets.UnavailableError as why:
                print(f"SKIPPED {name}: {why}", file=sys.stderr, flush=True)
        yield found


class Load:
    """The load generator's process: one for all jobs, because its start takes longer than a short job."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._process = _start_on_load_core(stack, "load")

    def __call__(self, relay: Relay, scenario: scenarios.Scenario) -> Mapping[str, Any]:
        """One job against one relay; a load that does not answer is replaced."""
        told, answers = self._process.stdin, self._process.stdout
        assert told is not None, "it is a pipe"
        assert answers is not None, "it is a pipe"
        place = {
            "port": relay.port,
            "process": relay.process,
            "tls": relay.tls,
            "second_port": relay.second_port,
        }
        with suppress(BrokenPipeError):
            told.write(json.dumps({**scenario.job, **place}) + "\n")
            told.flush()
        line = answers.readline() if select.select([answers], [], [], _JOB_S_MAX)[0] else ""
        if not line:
            self._process.kill()
            self._process = _start_on_load_core(self._stack, "load")
            return asdict(scenarios.Figures(bad=1, problem="the load generator has ended"))
        figures: Mapping[str, Any] = json.loads(line)
        return figures


def _measured(plan: scenarios.Plan, launches: Mapping[str, Any]) -> tuple[report.Runs, dict[str, str]]:
    """Return the figures of all rounds, each on relays that have just been started, and the relays' versions."""
    runs: dict[tuple[str, str, int], Mapping[str, Any]] = {}
    versions: dict[str, str] = {}
    search = capacity.Search(plan)
    begun_s, longest_s = time.monotonic(), 0.0
    with harness() as (ports, load):
        for number in range(plan.rounds):
            round_s = time.monotonic()
            if round_s - begun_s + longest_s > _RUN_S_MAX:
                break
            with _started(launches, ports, load) as relays:
                launches = {relay.name: launches[relay.name] for relay in relays if relay.name in launches}
                versions = {relay.name: relay.version for relay in relays if relay.version}
                for name, scenario, figures in _round(plan, relays if number % 2 == 0 else relays[::-1], load, search):
                    runs[name, scenario, number] = figures
            longest_s = max(longest_s, time.monotonic() - round_s)
            print(f"round {number + 1} of {plan.rounds} took {longest_s:.0f} s", file=sys.stderr, flush=True)
    return runs, versions


def _round(
    plan: scenarios.Plan, relays: list[Relay], load: Load, search: capacity.Search
) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield each relay's name, the scenario's and the figures; relays in this order."""
    for scenario in scenarios.each_round(plan):
        for relay in relays:
            if scenario.direct or relay.process is not None:
                yield relay.name, scenario.name, load(relay, scenario)
    by_name = {relay.name: relay for relay in relays}
    for relay in relays:
        if relay.process is not None and search.takes(relay.name):
            yield (
                relay.name,
                capacity.NAME,
                search.run(relay.name, lambda name, job: load(by_name[name or report.DIRECT], job)),
            )


def _start_on_load_core(stack: ExitStack, module: str, *arguments: str) -> subprocess.Popen[str]:
    with measure.on_load_core():
        process = subprocess.Popen(
            [sys.executable, "-m", f"tests.bench.relay.{module}", *arguments],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    stack.enter_context(process)
    stack.callback(process.terminate)
    return process


def _start_relay(stack: ExitStack, name: str, launch: Any, replicas: list[int], load: Load) -> Relay:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"gorgo-bench-{name}-")))
    place = targets.Place(port=free_port(), replicas=replicas, folder=folder)
    told: targets.Launch = launch(place)
    with measure.on_relay_core():
        process = targets.start(told, folder)
    stack.callback(targets.stop, process)
    relay = Relay(name, place.port, process.pid, told.version, told.tls)
    _wait_until_answering(relay, process, folder, load, told.start_s)
    return relay


def _wait_until_answering(
    relay: Relay, process: subprocess.Popen[bytes], folder: Path, load: Load, start_s: float
) -> None:
    until_s = time.monotonic() + start_s
    job = {"kind": "closed", "seconds": 0.2, "size": scenarios.SMALL, "tokens": 1, "connections": 2}
    figures: Mapping[str, Any] = {"problem": "it never listened"}
    while time.monotonic() < until_s and process.poll() is None:
        figures = load(relay, scenarios.Scenario(name="warm-up", job=job))
        if figures["requests"] and not figures["bad"]:
            return
        time.sleep(0.2)
    log = (folder / "log").read_text(errors="replace").strip().splitlines()[-3:]
    raise targets.UnavailableError(f"{figures['problem']}; its log ends: {' | '.join(log) or 'empty'}")


def _raise_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def commit_here() -> str:
    try:
        told = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=_ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown (no git here)"
    return told.stdout.strip()
