"""`gorgo demo`: three simulated regions, a real proxy, a trace, and policies in turn; with `tune` also with a tuner.

Owns the options, the order of the policies, the child processes and the fleet that they form, and what is printed at
the end. Leaves the requests to `gorgo.lab.replay`.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import httpx
import yaml
from rich.console import Console

from gorgo.config.atomic import create_file, write_atomically
from gorgo.errors import FleetError, TraceError
from gorgo.lab.datasets import DEMO_TRACE, load_requests, shipped_path
from gorgo.lab.replay import replay
from gorgo.lab.replay_client import ReplayOptions
from gorgo.lab.results import ResultRow, load_text, results_table, write_results
from gorgo.lab.termination import termination_as_interrupt
from gorgo.lab.traces import TraceFilters, TraceRequest
from gorgo.live.training_status import model_line
from gorgo.policies.registry import OURS, PAPER, PUBLISHED, RANDOM

#: The default of `gorgo serve`, then the paper's. `random` would take the demo over its three minutes.
DEFAULT_POLICIES: tuple[str, ...] = (OURS, *(name for name in PUBLISHED if name != RANDOM))
#: With `tune`: the one whose weights the paper tunes.
TUNED_POLICIES: tuple[str, ...] = (PAPER,)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """Which policies run on which trace.

    Parameters
    ----------
    policies:
        One fresh fleet each, in this order. Empty: `DEFAULT_POLICIES`, with `tune` `TUNED_POLICIES`.
    trace:
        None: the small trace that comes with the project, with `tune` short chats.
    filters, time_scale:
        As for a replay.
    out:
        Keeps requests, results and process logs there; None: nothing is left behind.
    seed:
        Of the network's jitter, the proxy's ties and the scatter.
    show_progress:
        Progress on stderr.
    tune:
        Three rows of each policy, on fleets of a small model and on short chats: under a `gorgo tune` with blocks of
        seconds, then on the last part of the trace, which it has not seen, by the defaults and by what it found.
    """

    policies: tuple[str, ...] = ()
    trace: Path | None = None
    filters: TraceFilters = field(default_factory=TraceFilters)
    time_scale: float = 1.0
    out: Path | None = None
    seed: int = 0
    show_progress: bool = True
    tune: bool = False

    @property
    def chosen(self) -> tuple[str, ...]:
        return self.policies or (TUNED_POLICIES if self.tune else DEFAULT_POLICIES)


# Child processes: started, watched until they are ready, and always stopped.
#
# Their output goes to files, never to pipes that could fill. They are stopped by SIGTERM, a bounded wait and SIGKILL,
# also after Ctrl-C during the stop. `gorgo` processes end by themselves if this one is killed
# (`gorgo.lab.termination`).


#: For so many interpreters that start at once on two slow cores.
READY_TIMEOUT_S, STARTED_AT_ONCE = 30.0, 4
#: Nothing is in flight when a fleet is stopped, so a process that needs longer hangs.
STOP_TIMEOUT_S = 5.0
#: For one that has something to put in order first, and a disk to wait for.
FINISH_TIMEOUT_S = 20.0
POLL_S = 0.02
#: Of a process's output in an error.
LAST_LINES = 8


class Processes:
    """`python -m gorgo ...` processes of one fleet.

    Parameters
    ----------
    logs:
        Folder for one log file per process.
    environ:
        Their environment.
    stop_timeout_s:
        Between SIGTERM and SIGKILL.
    """

    def __init__(self, logs: Path, environ: Mapping[str, str], *, stop_timeout_s: float = STOP_TIMEOUT_S) -> None:
        self._logs = logs
        self._environ = dict(environ)
        self._stop_timeout_s = stop_timeout_s
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        #: Ends of the pipe by which children notice that this process has ended; not inherited but as their stdin.
        self._alive: tuple[int, int] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def start(self, name: str, arguments: Sequence[str]) -> None:
        """Start `gorgo` with `arguments`, without waiting."""
        self._alive = self._alive or os.pipe()
        self._start(name, [sys.executable, "-m", "gorgo.lab.termination", *arguments], stdin=self._alive[0])

    def start_command(self, name: str, command: Sequence[str]) -> None:
        """Start any command under `name`."""
        self._start(name, command, stdin=subprocess.DEVNULL)

    def _start(self, name: str, command: Sequence[str], *, stdin: int) -> None:
        with create_file(self._log(name)) as log:
            self._running[name] = subprocess.Popen(
                list(command), stdin=stdin, stdout=log, stderr=subprocess.STDOUT, env=self._environ
            )

    def wait_for_line(self, name: str, pattern: str, *, timeout_s: float = READY_TIMEOUT_S) -> re.Match[str]:
        """Return the first match in the process's output; raises `FleetError` if it ends or prints no match."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            ended = self._running[name].poll() is not None
            if match := re.search(pattern, self._said(name), re.MULTILINE):
                return match
            if ended:
                raise FleetError(f"{name} {self._state(name)} before it was ready{self._last_words(name)}")
            if time.monotonic() > deadline_s:
                late = f"{name} was not ready within {timeout_s:g} s; expected {pattern!r} in its output"
                raise FleetError(f"{late}, and a machine with less to do{self._last_words(name)}")
            time.sleep(POLL_S)

    def check_alive(self) -> None:
        """Raise `FleetError` if a process has ended by itself."""
        for name, process in self._running.items():
            if process.poll() is not None:
                raise FleetError(f"{name} {self._state(name)}{self._last_words(name)}")

    def kill(self, name: str) -> None:
        """End a process as a crash does."""
        process = self._running.pop(name)
        process.kill()
        process.wait()

    def finish(self, name: str, *, timeout_s: float = FINISH_TIMEOUT_S) -> str:
        """Stop one process with SIGTERM and return its output.

        Raises `FleetError` if it does not end, or fails.
        """
        self._running[name].terminate()
        return self.wait(name, timeout_s=timeout_s)

    def wait(self, name: str, *, timeout_s: float = FINISH_TIMEOUT_S) -> str:
        """Wait for a process that ends by itself, and return its output."""
        process = self._running[name]
        _wait(process, time.monotonic() + timeout_s)
        if process.poll() != 0:
            raise FleetError(f"{name} {self._state(name)}{self._last_words(name)}")
        del self._running[name]
        return self._said(name)

    def stop(self) -> None:
        """Stop all running processes."""
        try:
            for process in self._running.values():
                process.terminate()
            deadline_s = time.monotonic() + self._stop_timeout_s
            for process in self._running.values():
                _wait(process, deadline_s)
        finally:
            for process in self._running.values():
                process.kill()  # does nothing to one that has ended
                process.wait()
            self._running.clear()
            for end in self._alive or ():
                os.close(end)
            self._alive = None

    def _state(self, name: str) -> str:
        code = self._running[name].poll()
        return "is still running" if code is None else f"ended with exit code {code}"

    def _log(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def _said(self, name: str) -> str:
        return self._log(name).read_text(encoding="utf-8", errors="replace")

    def _last_words(self, name: str) -> str:
        lines = self._said(name).splitlines()[-LAST_LINES:]
        return ":\n" + "\n".join(f"  {line}" for line in lines) if lines else ""


def _wait(process: subprocess.Popen[bytes], deadline_s: float) -> None:
    try:
        process.wait(timeout=max(0.0, deadline_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        return


# A fresh fleet for one policy: simulated engines and the proxy in front of them, each its own process.


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetLayout:
    """The simulated engines of a fleet.

    Parameters
    ----------
    profile:
        Of every engine.
    round_trip_ms:
        Mean round trip to each region from the proxy, which is in the first.
    replicas:
        Region of each replica.
    capacity:
        What the proxy assumes of each replica, as in regions.yaml; empty: its defaults, and what engines report.
    """

    profile: str
    round_trip_ms: Mapping[str, int]
    replicas: Mapping[str, str]
    capacity: Mapping[str, float] = field(default_factory=dict)


#: The fleet that is fitted to the paper is beyond its capacity at the nine requests a second of the demo.
PROFILE = "2xL40S-Qwen3.5-35B-A3B-FP8-estimate"
#: Region of each replica and its mean round trip from the proxy, which is in the first.
ROUND_TRIP_MS = {"us-ashburn": 2, "eu-frankfurt": 95, "ap-seoul": 180}
REPLICAS = {"ashburn-0": "us-ashburn", "frankfurt-0": "eu-frankfurt", "seoul-0": "ap-seoul"}
DEMO_LAYOUT = FleetLayout(profile=PROFILE, round_trip_ms=ROUND_TRIP_MS, replicas=REPLICAS)
#: A millisecond of round trip is worth 140 prompt tokens of so small a model, and the default of `gorgo` says 0.5.
TUNED_LAYOUT = replace(DEMO_LAYOUT, profile="1xA30-Llama-3.2-1B")
MODEL = "gorgo-sim"
#: The paper probes and scrapes every 30 s; a run here is shorter than that.
PROBE_INTERVAL_S = 2.0
#: For policies that learn: models of some tens of requests, since a run has about two hundred. Short of a finding.
LEARNING = {"first_samples": 40, "round_samples": 40, "epochs": 300}
#: For the first probe of each replica to come back.
PROBED_TIMEOUT_S = 20.0
#: Replaced as soon as the engines say where they listen.
UNKNOWN_URL = "http://127.0.0.1:1"


@dataclass(frozen=True, slots=True)
class DemoFleet:
    """A running fleet: addresses of its proxy, and its processes."""

    url: str
    admin_url: str
    token: str
    processes: Processes

    def weights(self) -> dict[str, float]:
        """Return the weights in force."""
        weights = self._admin("/admin/weights")["weights"]
        return {name: float(value) for name, value in weights.items()}

    def learned(self) -> str | None:
        """Return what the policy has learned, in words; `None` for one that does not learn."""
        return model_line(self._admin("/admin/model"))

    def wait_until_probed(self) -> None:
        """Wait until the proxy knows the round trip to every replica; raises `FleetError` after a timeout."""
        deadline_s = time.monotonic() + PROBED_TIMEOUT_S
        while any(replica["rtt_ms"] is None for replica in self._admin("/admin/fleet")["replicas"]):
            self.processes.check_alive()
            if time.monotonic() > deadline_s:
                raise FleetError(f"the proxy did not reach every replica within {PROBED_TIMEOUT_S:g} s")
            time.sleep(POLL_S)

    def _admin(self, path: str) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {self.token}"}
        try:
            response = httpx.get(self.admin_url + path, headers=headers, timeout=5.0, trust_env=False)
            answer: dict[str, Any] = response.raise_for_status().json()
        except (httpx.HTTPError, json.JSONDecodeError) as error:
            raise FleetError(f"GET {path} of the proxy: {error}") from None
        return answer


@contextmanager
def running_fleet(
    policy: str,
    *,
    folder: Path,
    seed: int,
    layout: FleetLayout = DEMO_LAYOUT,
    weights: Mapping[str, float] | None = None,
) -> Iterator[DemoFleet]:
    """Start all processes, wait until they are ready, and stop them in any case. `weights` None: the defaults."""
    token = secrets.token_urlsafe(24)
    environ = {**os.environ, "GORGO_ADMIN_TOKEN": token, "PYTHONUNBUFFERED": "1"}
    config = folder / "regions.yaml"
    write = partial(write_config, config, policy, seed, layout, weights=weights or {})
    write(dict.fromkeys(layout.replicas, UNKNOWN_URL))
    with Processes(folder, environ) as processes:
        write(start_engines(processes, config, layout.replicas))
        processes.start("serve", ["serve", "--config", str(config), "--seed", str(seed)])
        ready = processes.wait_for_line("serve", r"listening on (http://\S+) \(admin (http://[^\s)]+)\)")
        fleet = DemoFleet(ready[1], ready[2], token, processes)
        fleet.wait_until_probed()
        yield fleet


def start_engines(
    processes: Processes, config: Path, names: Collection[str], *, timeout_s: float = READY_TIMEOUT_S
) -> dict[str, str]:
    """Start the simulated engines of these replicas of a configuration, wait for them, and return their URLs.

    `timeout_s` is for as many as start at once.
    """
    for name in names:
        processes.start(name, ["engine", "--replica", name, "--config", str(config), "--port", "0"])
    ready_s = timeout_s * max(1.0, (len(names) + 1) / STARTED_AT_ONCE)
    listens = r"listening on (http://\S+)"
    return {name: processes.wait_for_line(name, listens, timeout_s=ready_s)[1] for name in names}


def write_config(
    path: Path,
    policy: str,
    seed: int,
    layout: FleetLayout,
    urls: Mapping[str, str],
    *,
    weights: Mapping[str, float] = MappingProxyType({}),
) -> None:
    """Write a regions.yaml of the fleet, with these URLs of its replicas."""
    config = {
        "proxy": {
            "region": next(iter(layout.round_trip_ms)),
            "policy": policy,
            "weights": dict(weights),
            "bind": "127.0.0.1:0",
            "admin_bind": "127.0.0.1:0",
            "probe_interval_s": PROBE_INTERVAL_S,
            "scrape_interval_s": PROBE_INTERVAL_S,
            "learning": LEARNING,
        },
        "regions": [{"name": region} for region in layout.round_trip_ms],
        "replicas": [
            {"name": name, "region": region, "url": urls[name], "models": [MODEL], "capacity": dict(layout.capacity)}
            for name, region in layout.replicas.items()
        ],
        "simulation": {"rtt_ms": dict(layout.round_trip_ms), "seed": seed, "profile": layout.profile},
    }
    write_atomically(path, yaml.safe_dump(config, sort_keys=False).encode())


#: Of the tuner: a comparison of two weight sets takes six to eight pairs of blocks, each of some forty requests, in
#: which single prefills decide the gaps between tokens. So the guard, which watches them, is off.
SETTINGS = (
    "{block_s: 4, discard_s: 0.5, rest_blocks: 0, pairs: 8, guard: false, "
    "warm_up_s: 1, window: 32, hop: 8, poll_s: 0.5}\n"
)
TUNER = "tune"
#: What it tunes on unless a trace is given: two and a half minutes; with short answers decoding is no bottleneck.
TUNED_TRACE, TUNED_REQUESTS, TUNED_OUTPUT = "short-chat", 1_800, 64
#: Part of the requests, the last, that the tuner does not see.
HELD_OUT = 1 / 4


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRun:
    """One policy before a fresh fleet; `name` is of its row and of its folder, `weights` None are the defaults."""

    policy: str
    name: str
    requests: Sequence[TraceRequest]
    weights: Mapping[str, float] | None = None
    tuned: bool = False


def run_demo(options: DemoOptions, *, on_words: Callable[[str], None] | None = None) -> list[ResultRow]:
    """Run each policy and return its row, with `DemoOptions.tune` three rows: default, while tuned, frozen.

    Stops every process that it started; only `out` is left. `on_words` is called with what each policy has learned, and
    with `DemoOptions.tune` its tuning history as a table.

    Raises `TraceError` for the trace and `FleetError` if a process does not start or ends by itself.
    """
    options = _with_trace(options)
    assert options.trace is not None
    requests = load_requests(options.trace, options.filters, seed=options.seed)
    rows: list[ResultRow] = []
    with termination_as_interrupt(), _folder(options.out) as folder:
        for number, policy in enumerate(options.chosen, start=1):
            label = f"({number}/{len(options.chosen)})"
            of_policy = _tuned_rows if options.tune else _one_row
            made, words = of_policy(policy, requests, options, folder, label)
            rows += made
            if on_words is not None:
                for text in words:
                    on_words(text)
            if options.out is not None:
                write_results(options.out, rows)
    return rows


def _with_trace(options: DemoOptions) -> DemoOptions:
    if options.trace is not None:
        return options
    if not options.tune:
        return replace(options, trace=shipped_path(DEMO_TRACE))
    limit = TUNED_REQUESTS if options.filters.limit is None else options.filters.limit
    longest = TUNED_OUTPUT if options.filters.max_output is None else options.filters.max_output
    filters = replace(options.filters, limit=limit, max_output=longest)
    return replace(options, trace=Path(TUNED_TRACE), filters=filters)


Found = tuple[list[ResultRow], list[str]]


def _one_row(policy: str, requests: Sequence[TraceRequest], options: DemoOptions, folder: Path, label: str) -> Found:
    row, words, _ = _made(DemoRun(policy=policy, name=policy, requests=requests), options, folder, label)
    return [row], words


def _tuned_rows(policy: str, requests: Sequence[TraceRequest], options: DemoOptions, folder: Path, label: str) -> Found:
    """Tune on the first part of the requests, then serve the last part by the defaults and by the weights found."""
    first_part, held_out = parted(requests)
    tuned, words, weights = _made(
        DemoRun(policy=policy, name=f"{policy}, while tuned", requests=first_part, tuned=True),
        options, folder, label,
    )  # fmt: skip
    default, *_ = _made(DemoRun(policy=policy, name=f"{policy}, default", requests=held_out), options, folder, label)
    frozen, *_ = _made(
        DemoRun(policy=policy, name=f"{policy}, frozen", requests=held_out, weights=weights), options, folder, label
    )
    return [default, tuned, frozen], words


def parted(requests: Sequence[TraceRequest]) -> tuple[Sequence[TraceRequest], Sequence[TraceRequest]]:
    """Return the requests to tune on, and those held out, the first of each at 0; raise `TraceError` for one alone."""
    count = round(len(requests) * (1 - HELD_OUT))
    if not 0 < count < len(requests):
        raise TraceError(f"--tune divides a trace into two parts; expected 2 requests or more, found {len(requests)}")
    return requests[:count], TraceFilters().apply(requests[count:])


def _made(
    run: DemoRun, options: DemoOptions, folder: Path, label: str
) -> tuple[ResultRow, list[str], Mapping[str, float]]:
    """Return the row, what was learned in words, and the weights at the end."""
    run_folder = folder / run.name.replace(", ", "-").replace(" ", "-")
    run_folder.mkdir(parents=True, exist_ok=True)
    assert options.trace is not None
    layout = TUNED_LAYOUT if options.tune else DEMO_LAYOUT
    with running_fleet(run.policy, folder=run_folder, seed=options.seed, layout=layout, weights=run.weights) as fleet:
        if run.tuned:
            _start_tuner(fleet, run_folder, seed=options.seed)
        wanted = ReplayOptions(
            trace=options.trace,
            url=fleet.url,
            filters=options.filters,
            time_scale=options.time_scale,
            out=run_folder,
            model=MODEL,
            policy=run.name,
            weights=None if run.tuned else fleet.weights(),  # the tuner changes them
            show_progress=options.show_progress,
            label=f"{run.name} {label}",
        )
        report = asyncio.run(replay(run.requests, wanted))
        words = [_stop_tuner(fleet, run_folder)] if run.tuned else []
        learned = fleet.learned()
        words += [] if learned is None else [learned]
        fleet.processes.check_alive()
        return report.row, words, fleet.weights()


@contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    """Yield `out`, or a temporary folder."""
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        yield out
        return
    with tempfile.TemporaryDirectory(prefix="gorgo-demo-") as folder:
        yield Path(folder)


def _start_tuner(fleet: DemoFleet, folder: Path, *, seed: int) -> None:
    """Start `gorgo tune`, and wait until its campaign has begun; the processes' environment has the token."""
    settings = folder / "tune.yaml"
    write_atomically(settings, SETTINGS.encode())
    words = ["tune", "--url", fleet.admin_url, "--settings", str(settings), "--seed", str(seed)]
    fleet.processes.start(TUNER, [*words, "--database", _database(folder)])
    fleet.processes.wait_for_line(TUNER, r"^campaign \d+ on ")


def _stop_tuner(fleet: DemoFleet, folder: Path) -> str:
    """Stop the tuner and return its history as a table; `history.json` stays in the folder."""
    fleet.processes.finish(TUNER)
    fleet.processes.start("history", ["history", "--database", _database(folder), "--out", str(folder)])
    return fleet.processes.wait("history")


def _database(folder: Path) -> str:
    return f"sqlite:///{folder.resolve()}/history.sqlite3"


# The end of the demo: table, notes and next steps.


#: Where the table would be cut otherwise: no terminal, no width.
MIN_WIDTH = 80
TUNED_NOTE = "default and frozen: the last part of the trace, which the tuner did not see; while tuned: the first part."


def show_demo(rows: Sequence[ResultRow], console: Console, *, out: Path | None = None, tune: bool = False) -> None:
    """Print the table, notes on it, and next steps."""
    if not console.is_terminal:
        console = Console(file=console.file, width=max(MIN_WIDTH, console.width))
    console.print(results_table(rows))
    console.print()
    for line in _notes(rows, tune=tune) if rows else []:
        console.print(line, highlight=False)
    console.print("\nWhere to look next", style="bold")
    for line in _next_steps(out):
        console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)


def _notes(rows: Sequence[ResultRow], *, tune: bool) -> list[str]:
    trips = ", ".join(f"{name} {ROUND_TRIP_MS[region]} ms" for name, region in REPLICAS.items())
    requests = f"{rows[0].n} requests of {rows[0].trace} at {load_text(rows[0].time_scale)}"
    return [
        f"{requests}, each {'row' if tune else 'policy'} on a fresh fleet.",
        *([TUNED_NOTE] if tune else []),
        f"The proxy is real; engines and round trips are [bold]simulated[/bold] ({trips}).",
        f"Probes and scrapes every {PROBE_INTERVAL_S:g} s. One short run: small differences are noise.",
    ]


def _next_steps(out: Path | None) -> list[str]:
    files = (
        [
            f"{out}: results.json, and per policy requests.jsonl, regions.yaml and logs",
            f"{f'gorgo report {out}':<51}tables and plots as one page",
        ]
        if out is not None
        else []
    )
    return [
        *files,
        "gorgo demo --policy gorgo --policy power-of-two    other policies; gorgo policies lists them",
        "gorgo demo --trace TRACE.jsonl.gz --load 0.5       your own trace, at half its load",
        "gorgo demo --tune                                  the tuner at work beside the proxy",
        "gorgo demo --out DIR                               keeps every request's record",
        "gorgo serve --config regions.yaml                  the proxy in front of your replicas (README.md)",
    ]
