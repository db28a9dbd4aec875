"""How many runs a search has made, on stderr: a moving line on a terminal, otherwise a line now and then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

#: For logs: often enough to see life, seldom enough to read.
LINE_INTERVAL_S = 10.0


@contextmanager
def shown_runs(console: Console | None = None) -> Iterator[Callable[[], None]]:
    """What to call after each run. How many there will be, nobody knows before the search ends."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield _lines(console)
        return
    columns = (SpinnerColumn(), TextColumn("twin: {task.completed:.0f} runs"), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("twin", total=None)
        yield lambda: bar.advance(task)


def _lines(console: Console) -> Callable[[], None]:
    done, said_s = 0, monotonic()

    def told() -> None:
        nonlocal done, said_s
        done += 1
        if monotonic() - said_s >= LINE_INTERVAL_S:
            said_s = monotonic()
            console.print(f"twin: {done} runs", highlight=False)

    return told
