"""Progress of a long command on stderr: a bar on a terminal, otherwise a line every ten seconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

#: For logs: frequent enough to show life, rare enough to read.
LINE_INTERVAL_S = 10.0
BAR_INTERVAL_S = 0.25


class Advance(Protocol):
    """Counts one more run; `words` describe it."""

    def __call__(self, words: str = "") -> None: ...


class ProgressDisplay:
    """What is done of a command, as a bar or as lines.

    Parameters
    ----------
    title, total:
        What is counted; without a total only the count is shown.
    bar:
        None: lines.
    unit:
        Of the count, for the lines.
    """

    def __init__(self, title: str, total: int | None, console: Console, *, bar: Progress | None, unit: str) -> None:
        self._title, self._total, self._console, self._bar, self._unit = title, total, console, bar, unit
        self._task = None if bar is None else bar.add_task(title, total=total, words="")
        self._done, self._shown_s = 0, monotonic()

    @property
    def interval_s(self) -> float:
        """How often to call `update` where nothing is counted run by run."""
        return LINE_INTERVAL_S if self._bar is None else BAR_INTERVAL_S

    def advance(self, words: str = "") -> None:
        """Count one more; of the lines only the last one and one per interval is written."""
        self._done += 1
        if self._bar is not None or self._done == self._total or monotonic() - self._shown_s >= LINE_INTERVAL_S:
            self.update(self._done, words)

    def update(self, done: int, words: str = "", *, total: int | None = None) -> None:
        """Show a count now, and a total that was not known before."""
        self._total = total or self._total
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, total=self._total, words=words)
            return
        self._shown_s = monotonic()
        unit = f" {self._unit}".rstrip()
        count = f"{done}{unit}" if self._total is None else f"{done}/{self._total}{unit} done"
        line = ", ".join(part for part in (f"{self._title}: {count}", words) if part)
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def progress_display(
    title: str,
    total: int | None = None,
    *columns: ProgressColumn,
    unit: str = "",
    transient: bool = False,
    console: Console | None = None,
) -> Iterator[ProgressDisplay]:
    """Show progress while the body runs: on a terminal `columns` between title and words.

    A `transient` display is removed at the end, and leaves nothing in a log.
    """
    console = console or Console(stderr=True)
    if not console.is_terminal and not transient:
        yield ProgressDisplay(title, total, console, bar=None, unit=unit)
        return
    parts: Sequence[ProgressColumn] = (TextColumn("{task.description}", markup=False), *columns)
    words = TextColumn("{task.fields[words]}", markup=False)
    with Progress(*parts, words, console=console, transient=transient, disable=not console.is_terminal) as bar:
        yield ProgressDisplay(title, total, console, bar=bar, unit=unit)


@contextmanager
def shown_progress(title: str, total: int | None = None, console: Console | None = None) -> Iterator[Advance]:
    """Show the number of runs while the body runs; without a total only the count and the time."""
    rest = (TimeRemainingColumn(),) if total is not None else ()
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), *rest)
    with progress_display(title, total, *columns, unit="runs", console=console) as display:
        yield display.advance
