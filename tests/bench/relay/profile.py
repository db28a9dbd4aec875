"""Where the relay's time goes: py-spy samples `gorgo serve` under three of the benchmark's loads.

py-spy comes from the user's cache like sglang-router, and needs leave to trace (root, or a permissive ptrace_scope).
While it samples, the relay is slower; shares are what to read. A sample with the interpreter inside a C function counts
for the Python function that called it, so the self share of `_write` holds the system call.
"""

from __future__ import annotations

import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tests.bench.relay import bench, measure, scenarios, targets

_SHOWN = 25
_SAMPLES_PER_S = 250
_PROFILED = ("requests_small", "requests_large", "events")
_STOP_S_MAX = 20
#: A thread of the pool that waits for its next task; py-spy takes it for busy.
_WAITING = "_worker (concurrent/futures/thread.py"
#: What is below every stack: how the process and its event loop were started.
_STARTERS = ("runpy", "gorgo/__main__", "gorgo/cli", "typer/", "click/", "asyncio/runners", "uvloop/__init__")


def run() -> None:
    """Print the top functions of the relay for requests and for events."""
    print(f"Relay profile\n{measure.describe_machine()}", flush=True)
    try:
        program = targets.installed(targets.PY_SPY) / "py-spy"
    except targets.UnavailableError as why:
        print(f"SKIPPED: {why}")
        return
    with bench.running({"gorgo": targets.RELAYS["gorgo"]}) as (relays, load):
        for scenario in scenarios.each_round(scenarios.Plan(rounds=1, scale=5.0)):
            if scenario.name in _PROFILED and len(relays) > 1:
                print(f"\n{scenario.name}: {_shares(_sampled(program, relays[-1], scenario, load))}")


def _sampled(
    program: Path, relay: bench.Relay, scenario: scenarios.Scenario, load: bench.Load
) -> Counter[tuple[str, ...]]:
    """Collapsed stacks, outermost function first, with their number of samples."""
    with tempfile.NamedTemporaryFile(suffix=".txt") as file:
        options = ["--format", "raw", "--output", file.name, "--rate", str(_SAMPLES_PER_S), "--function"]
        with subprocess.Popen(
            [str(program), "record", *options, "--pid", str(relay.process)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as sampler:
            time.sleep(1.0)  # it attaches
            load(relay, scenario)
            sampler.send_signal(signal.SIGINT)
            _, told = sampler.communicate(timeout=_STOP_S_MAX)
        return parse_stacks(Path(file.name).read_text().splitlines()) or _complain(told)


def parse_stacks(lines: Iterable[str]) -> Counter[tuple[str, ...]]:
    """py-spy's raw lines, `function (file);function (file) samples`.

    >>> parse_stacks(["main (a.py);run (b.py) 3"])
    Counter({('main (a.py)', 'run (b.py)'): 3})
    """
    stacks: Counter[tuple[str, ...]] = Counter()
    for line in lines:
        frames, _, samples = line.rpartition(" ")
        stack = tuple(frames.split(";"))
        if not stack[-1].startswith(_WAITING):
            stacks[stack] += int(samples)
    return stacks


def _complain(told: str) -> Counter[tuple[str, ...]]:
    print("no samples:", " ".join(told.split()[-40:]))
    return Counter()


def _shares(stacks: Counter[tuple[str, ...]]) -> str:
    """Two tables: functions by their own time, and gorgo's functions with what libraries do below each of them."""
    total = stacks.total() or 1
    own: Counter[str] = Counter()
    owned: Counter[str] = Counter()
    for frames, samples in stacks.items():
        own[frames[-1]] += samples
        owned[_owner(frames)] += samples
    lines = [f"{stacks.total()} samples", "functions by their own time"]
    lines += _lines(own, total)
    lines += ["gorgo's functions, each with the libraries below it; what the libraries do on their own behalf"]
    return "\n".join(lines + _lines(owned, total))


def _owner(frames: tuple[str, ...]) -> str:
    """The innermost function of gorgo that serves a request, else the library that the event loop called."""
    served = [frame for frame in frames if not any(starter in frame for starter in _STARTERS)]
    if not served:
        return "the event loop and its system calls"
    return next(
        (frame for frame in reversed(served) if "(gorgo/" in frame), f"{_library(served[0])}, called by the loop"
    )


def _library(frame: str) -> str:
    return frame.rpartition("(")[2].partition("/")[0]


def _lines(counts: Counter[str], total: int) -> list[str]:
    return [f"{100 * samples / total:6.1f} %  {name}" for name, samples in counts.most_common(_SHOWN)]
