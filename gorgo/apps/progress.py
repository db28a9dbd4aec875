"""Progress of many runs on stderr: a bar on a terminal, otherwise a line every ten seconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

#: For logs: frequent enough to show life, rare enough to read.
LINE_INTERVAL_S = 10.0


class Advance(Protocol):
    """Counts one more run; `words` describe it."""

    def __call__(self, words: str = "") -> None: ...


@contextmanager
def shown_progress(title: str, total: int | None = None, console: Console | None = None) -> Iterator[Advance]:
    """Show progress while the body runs; without a total only the count and the time."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield _lines(title, total, console)
        return
    rest = (TimeRemainingColumn(),) if total is not None else ()
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), *rest)
    with Progress(*columns, TextColumn("{task.fields[last]}"), console=console) as bar:
        task = bar.add_task(title, total=total, last="")

        def advance(words: str = "") -> None:
            bar.update(task, advance=1, last=words)

        yield advance


def _lines(title: str, total: int | None, console: Console) -> Advance:
    done, shown_s = 0, monotonic()

    def advance(words: str = "") -> None:
        nonlocal done, shown_s
        done += 1
        if done == total or monotonic() - shown_s >= LINE_INTERVAL_S:
            shown_s = monotonic()
            count = f"{done} runs" if total is None else f"{done}/{total} runs done"
            line = ", ".join(part for part in (f"{title}: {count}", words) if part)
            console.print(line, highlight=False, markup=False, soft_wrap=True)

    return advance
