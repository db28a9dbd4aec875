"""Progress of a replay on stderr, read from its tally."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn

from gorgo.apps.progress import ProgressDisplay, progress_display
from gorgo.apps.replay.summary import Tally

#: So that the longest policy's name, the bar and the status fit 80 characters.
BAR_WIDTH = 8


class ReplayProgress:
    """The progress of a replay. The replay sets `in_flight`; the rest is read from the tally."""

    def __init__(self, tally: Tally, total: int, label: str, console: Console | None = None) -> None:
        self._tally = tally
        self._total = total
        self._label = label
        self._console = console
        self.in_flight = 0

    def status(self) -> str:
        """Return the state of the replay as text."""
        p95_s = self._tally.ttft_s_p95()
        ttft = "-" if p95_s is None else f"{p95_s * 1000:,.0f} ms"
        return f"{self.in_flight} in flight, {self._tally.error_count} errors, TTFT p95 {ttft}"

    @asynccontextmanager
    async def displayed(self) -> AsyncIterator[None]:
        """Show progress while the body runs, and its result."""
        columns = (BarColumn(bar_width=BAR_WIDTH), MofNCompleteColumn())
        with progress_display(self._label, self._total, *columns, console=self._console) as display:
            task = asyncio.create_task(self._show(display), name="replay progress")
            try:
                yield
            finally:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
                display.update(self._tally.n, self.status())

    async def _show(self, display: ProgressDisplay) -> None:
        while True:
            await asyncio.sleep(display.interval_s)
            display.update(self._tally.n, self.status())
