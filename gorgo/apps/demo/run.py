"""The demo: each policy on a fresh fleet, the same requests through a real proxy; with `tune` a tuner beside it."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from gorgo.apps.datasets import DEMO_TRACE, load_requests, shipped_path
from gorgo.apps.demo.fleet import MODEL, DemoFleet, running_fleet
from gorgo.apps.demo.options import DemoOptions
from gorgo.apps.replay import ReplayOptions, replay
from gorgo.apps.results import ResultRow, write_results
from gorgo.apps.termination import termination_as_interrupt
from gorgo.apps.traces import TraceRequest
from gorgo.config.atomic import write_atomically

#: A quarter of the paper's window and hop: a generation every second or two of the demo's trace. Short of a finding.
SETTINGS = "{window: 32, hop: 8, warm_up_s: 1, poll_s: 0.5}\n"
TUNER = "tune"


def run_demo(options: DemoOptions, *, on_words: Callable[[str], None] | None = None) -> list[ResultRow]:
    """Run each policy and return its row. Stops every process that it started; only `out` is left.

    `on_words` is called with what each policy has learned, and with `options.tune` its tuning history as a table.

    Raises `TraceError` for the trace and `FleetError` if a process does not start or ends by itself.
    """
    trace = options.trace or shipped_path(DEMO_TRACE)
    requests = load_requests(trace, options.filters, seed=options.seed)
    rows: list[ResultRow] = []
    with termination_as_interrupt(), _folder(options.out) as folder:
        for place, policy in enumerate(options.chosen, start=1):
            label = f"{policy} ({place}/{len(options.chosen)})"
            row, words = _one_policy(policy, requests, replace(options, trace=trace), folder / policy, label)
            rows.append(row)
            if on_words is not None:
                for text in words:
                    on_words(text)
            if options.out is not None:
                write_results(options.out, rows)
    return rows


def _one_policy(
    policy: str, requests: Sequence[TraceRequest], options: DemoOptions, folder: Path, label: str
) -> tuple[ResultRow, list[str]]:
    folder.mkdir(parents=True, exist_ok=True)
    assert options.trace is not None
    with running_fleet(policy, folder=folder, seed=options.seed) as fleet:
        if options.tune:
            _start_tuner(fleet, folder, seed=options.seed)
        wanted = ReplayOptions(
            trace=options.trace,
            url=fleet.url,
            filters=options.filters,
            time_scale=options.time_scale,
            out=folder,
            model=MODEL,
            policy=policy,
            weights=None if options.tune else fleet.weights(),  # the tuner changes them
            show_progress=options.show_progress,
            label=label,
        )
        report = asyncio.run(replay(requests, wanted))
        words = [_stop_tuner(fleet, folder)] if options.tune else []
        learned = fleet.learned()
        words += [] if learned is None else [learned]
        fleet.processes.check_alive()
    return report.row, words


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
    words = ["tune", "--url", fleet.admin_url, "--mode", "paper", "--settings", str(settings), "--seed", str(seed)]
    fleet.processes.start(TUNER, [*words, "--database", _database(folder)])
    fleet.processes.wait_for_line(TUNER, r"^campaign \d+ on ")


def _stop_tuner(fleet: DemoFleet, folder: Path) -> str:
    """Stop the tuner and return its history as a table; `history.json` stays in the folder."""
    fleet.processes.finish(TUNER)
    fleet.processes.start("history", ["history", "--database", _database(folder), "--out", str(folder)])
    return fleet.processes.wait("history")


def _database(folder: Path) -> str:
    return f"sqlite:///{folder.resolve()}/history.sqlite3"
