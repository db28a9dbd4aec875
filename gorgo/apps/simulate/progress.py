"""How far many runs are, on stderr: a bar on a terminal, otherwise a line now and then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gorgo.apps.simulate.job import SimulatedRun

#: For logs: often enough to see life, seldom enough to read.
LINE_INTERVAL_S = 10.0

Told = Callable[[int, int, SimulatedRun], None]


@contextmanager
def shown_progress(total: int, console: Console | None = None) -> Iterator[Told]:
    """What to tell of each finished run while the body runs."""
    console = console or Console(stderr=True)
    if console.is_terminal:
        with _bar(total, console) as told:
            yield told
    else:
        yield _lines(console)


@contextmanager
def _bar(total: int, console: Console) -> Iterator[Told]:
    columns = (TextColumn("simulate"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[last]}"), console=console) as bar:
        task = bar.add_task("simulate", total=total, last="")

        def told(done: int, _total: int, run: SimulatedRun) -> None:
            bar.update(task, completed=done, last=_words(run))

        yield told


def _lines(console: Console) -> Told:
    said_s = monotonic()

    def told(done: int, total: int, run: SimulatedRun) -> None:
        nonlocal said_s
        if done == total or monotonic() - said_s >= LINE_INTERVAL_S:
            said_s = monotonic()
            console.print(f"simulate: {done}/{total} runs done, {_words(run)}", highlight=False, soft_wrap=True)

    return told


def _words(run: SimulatedRun) -> str:
    return f"{run.job.policy} x{run.job.time_scale:g} seed {run.job.seed}"
