"""The demo: each policy in turn on a fresh fleet, the same requests through a real proxy, one table."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from gorgo.apps.datasets import DEMO_TRACE, load_requests, shipped_path
from gorgo.apps.demo.fleet import MODEL, running_fleet
from gorgo.apps.demo.options import DemoOptions
from gorgo.apps.demo.tuning import end_tuner, start_tuner
from gorgo.apps.replay import ReplayOptions, replay
from gorgo.apps.results import ResultRow, write_results
from gorgo.apps.termination import termination_as_interrupt
from gorgo.apps.traces import TraceRequest


def run_demo(options: DemoOptions, *, tell: Callable[[str], None] | None = None) -> list[ResultRow]:
    """One row per policy. Stops everything that it started, whatever happens, and leaves nothing but `out`.

    With `options.tune`, `tell` is given each policy's tuning history as a table.

    Raises `TraceError` for the trace and `FleetError` if a process does not start or ends by itself.
    """
    trace = options.trace or shipped_path(DEMO_TRACE)
    requests = load_requests(trace, options.filters, seed=options.seed)
    rows: list[ResultRow] = []
    with termination_as_interrupt(), _folder(options.out) as folder:
        for place, policy in enumerate(options.chosen, start=1):
            label = f"{policy} ({place}/{len(options.chosen)})"
            row, history = _one_policy(policy, requests, replace(options, trace=trace), folder / policy, label)
            rows.append(row)
            if tell is not None and history is not None:
                tell(history)
            if options.out is not None:
                write_results(options.out, rows)
    return rows


def _one_policy(
    policy: str, requests: Sequence[TraceRequest], options: DemoOptions, folder: Path, label: str
) -> tuple[ResultRow, str | None]:
    folder.mkdir(parents=True, exist_ok=True)
    assert options.trace is not None
    with running_fleet(policy, folder=folder, seed=options.seed) as fleet:
        if options.tune:
            start_tuner(fleet, folder, seed=options.seed)
        wanted = ReplayOptions(
            trace=options.trace,
            url=fleet.url,
            filters=options.filters,
            time_scale=options.time_scale,
            out=folder,
            model=MODEL,
            policy=policy,
            weights=None if options.tune else fleet.weights(),  # there is no one set to name
            show_progress=options.show_progress,
            label=label,
        )
        report = asyncio.run(replay(requests, wanted))
        history = end_tuner(fleet, folder) if options.tune else None
        fleet.processes.check_alive()
    return report.row, history


@contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    """`out`, or one that is gone afterwards."""
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        yield out
        return
    with tempfile.TemporaryDirectory(prefix="gorgo-demo-") as folder:
        yield Path(folder)
