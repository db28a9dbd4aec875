"""Where the relay's time goes: py-spy samples `gorgo serve` under three of the benchmark's loads.

py-spy comes from the user's cache like sglang-router, and needs leave to trace (root, or a permissive ptrace_scope).
While it samples, the relay is slower, so shares of the samples are applied to what the same load cost just before. A
sample in a system call counts for that; one in other C code for the Python function that called it. A thread that waits
for a core counts as waiting, so only a quiet machine gives true shares.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.bench.relay import bench, measure, scenarios, targets

_SHOWN = 25
_SAMPLES_PER_S = 200
_PROFILED = ("requests_small", "requests_large", "events")
_RELAYS = ("floor", "gorgo")
#: Factor on the length of a job: thousands of samples.
_SCALE = 6.0
_STOP_S_MAX = 60
#: A thread of the pool that waits for its next task; py-spy takes it for busy.
_WAITING = "_worker (concurrent/futures/thread.py"
#: What is below every stack: how the process and its event loop were started.
_STARTERS = ("runpy", "gorgo/__main__", "gorgo/cli", "typer/", "click/", "asyncio/runners", "uvloop/__init__", "loop.c")
#: Innermost functions of C.
_CALLS: Mapping[str, tuple[str, ...]] = {
    "system call: write": ("write", "writev", "send", "sendmsg", "sendto"),
    "system call: read": ("read", "readv", "recv", "recvmsg", "recvfrom"),
    "system call: wait": ("epoll_pwait", "epoll_wait", "epoll_ctl", "syscall"),
}
#: Code of a stage with the libraries below it, by the folder of its innermost function; the first that fits.
_STAGES: Mapping[str, tuple[str, ...]] = {
    "first token, usage, gaps": ("gorgo/core/stream",),
    "reading the prompt": ("gorgo/live/parsing", "gorgo/core/prompt", "gorgo/core/json_cost", "gorgo/core/messages"),
    "decision, reservation": ("gorgo/core", "gorgo/live/event_loop", "gorgo/live/state"),
    "metrics, logs, request log": ("gorgo/live/telemetry", "gorgo/live/logs"),
    "the replica's connection": ("gorgo/live/upstream", "tests/bench/relay/floor"),
    "the client's connection": ("gorgo/live/listener", "gorgo/proxy/http", "hypercorn"),
    "course of a request": ("gorgo/",),
}
_LOOP = "event loop, parser"


def run(*, as_json: bool = False) -> None:
    """Print where the relay's time goes for requests and for events: by stage beside the floor, and by function."""
    if not as_json:
        print(f"Relay profile\n{measure.describe_machine()}", flush=True)
    try:
        program = targets.installed(targets.PY_SPY) / "py-spy"
    except targets.UnavailableError as why:
        raise SystemExit(f"py-spy: {why}") from why
    found: dict[str, dict[str, dict[str, float]]] = {}
    chosen = {name: targets.RELAYS[name] for name in _RELAYS}
    with bench.running(chosen) as (relays, load):
        for scenario in scenarios.each_round(scenarios.Plan(rounds=1, scale=_SCALE)):
            for relay in relays if scenario.name in _PROFILED else ():
                if relay.process is not None:
                    cost_us = _cost_us(load(relay, scenario))  # before it is disturbed
                    stacks = _sampled(program, relay, scenario, load)
                    found.setdefault(scenario.name, {})[relay.name] = stages(stacks, cost_us)
                    if not as_json:
                        print(f"\n{relay.name}, {scenario.name}: {cost_us:.1f} us, {_shares(stacks)}")
    if as_json:
        print(json.dumps({"machine": measure.describe_machine(), "stages_us": found}))
    else:
        print(_stage_table(found))


def stages(stacks: Counter[tuple[str, ...]], cost_us: float) -> dict[str, float]:
    """Return the microseconds of each stage, which add up to the cost."""
    total = stacks.total() or 1
    found: Counter[str] = Counter()
    for frames, samples in stacks.items():
        found[stage_of(frames)] += samples
    return {name: cost_us * found[name] / total for name in (*_CALLS, *_STAGES, _LOOP)}


def stage_of(frames: tuple[str, ...]) -> str:
    """Return the stage of a stack: its system call, else the innermost code of the relay, else the event loop."""
    leaf = frames[-1].partition(" ")[0]
    for name, functions in _CALLS.items():
        if leaf in functions:
            return name
    served = [frame for frame in frames if not any(starter in frame for starter in _STARTERS)]
    for frame in reversed(served):
        for name, places in _STAGES.items():
            if any(f"({place}" in frame for place in places):
                return name
    return _LOOP


def _cost_us(figures: Mapping[str, Any]) -> float:
    return float(figures["cpu_s"] / max(1, figures["tokens"] or figures["requests"]) * 1e6)


def _stage_table(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    columns = {f"{scenario}, {relay}": of for scenario, relays in found.items() for relay, of in relays.items()}
    lines = [f"{'stage, us':<36}" + "".join(f"{name:>24}" for name in columns)]
    every = (*_CALLS, *_STAGES, _LOOP)
    lines += [f"{stage:<36}" + "".join(f"{of[stage]:>24.1f}" for of in columns.values()) for stage in every]
    return "\n" + "\n".join(lines)


def _sampled(
    program: Path, relay: bench.Relay, scenario: scenarios.Scenario, load: bench.Load
) -> Counter[tuple[str, ...]]:
    """Collapsed stacks, outermost function first, with their number of samples."""
    with tempfile.NamedTemporaryFile(suffix=".txt") as file:
        options = ["--format", "raw", "--output", file.name, "--rate", str(_SAMPLES_PER_S), "--function"]
        with measure.on_load_core():
            command = [str(program), "record", "--native", *options, "--pid", str(relay.process)]
            sampler = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        with sampler:
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
        if not any(frame.startswith(_WAITING) for frame in stack):
            stacks[stack] += int(samples)
    return stacks


def _complain(told: str) -> Counter[tuple[str, ...]]:
    print("no samples:", " ".join(told.split()[-40:]), file=sys.stderr)
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
