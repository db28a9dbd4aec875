"""Progress on stderr: a bar on a terminal, otherwise a line now and then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from gorgo.apps.replay.summary import Tally

BAR_INTERVAL_S = 0.25
#: So that the longest policy's name, the bar and the status fit 80 characters.
BAR_WIDTH = 8
#: For logs: often enough to see life, seldom enough to read.
LINE_INTERVAL_S = 10.0


class ReplayProgress:
    """The progress of a replay. The replay sets `in_flight`; the rest is read from the tally."""

    def __init__(self, tally: Tally, total: int, label: str, console: Console | None = None) -> None:
        self._tally = tally
        self._total = total
        self._label = label
        self._console = console or Console(stderr=True)
        self.in_flight = 0

    def status(self) -> str:
        """Return the state of the replay as text."""
        p95_s = self._tally.ttft_s_p95()
        ttft = "-" if p95_s is None else f"{p95_s * 1000:,.0f} ms"
        return f"{self.in_flight} in flight, {self._tally.error_count} errors, TTFT p95 {ttft}"

    @asynccontextmanager
    async def displayed(self) -> AsyncIterator[None]:
        """Show progress while the body runs, and its result."""
        show = self._bar if self._console.is_terminal else self._lines
        task = asyncio.create_task(show(), name="replay progress")
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _bar(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=BAR_WIDTH), MofNCompleteColumn())
        with Progress(*columns, TextColumn("{task.fields[status]}"), console=self._console, auto_refresh=False) as bar:
            task = bar.add_task(self._label, total=self._total, status=self.status())
            try:
                while True:
                    bar.update(task, completed=self._tally.n, status=self.status(), refresh=True)
                    await asyncio.sleep(BAR_INTERVAL_S)
            finally:
                bar.update(task, completed=self._tally.n, status=self.status(), refresh=True)

    async def _lines(self) -> None:
        try:
            while True:
                await asyncio.sleep(LINE_INTERVAL_S)
                self._line()
        finally:
            self._line()

    def _line(self) -> None:
        line = f"{self._label}: {self._tally.n}/{self._total} done, {self.status()}"
        self._console.print(line, highlight=False, soft_wrap=True)
