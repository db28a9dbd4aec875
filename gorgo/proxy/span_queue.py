"""Spans that have ended, on their way to a collector: a bounded queue, sent in batches by a thread.

Owns how many wait, when they are sent, and what is counted and said of it. What a span is, `tracing` knows; the bytes
are the exporter's. The SDK's own batch processor is left out: it counts nothing that a scrape could show, and a proxy
that stops would wait for it without a bound.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from gorgo.proxy.logs import log

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import ReadableSpan, Span

#: Spans that may wait: some 500 requests, a few MB.
MAX_WAITING = 2048
#: Sent at once: half a megabyte.
BATCH = 512
#: Between two sends, s; a full batch does not wait.
FLUSH_S = 2.0
#: For one batch with everything that is tried again, s; a proxy that stops waits so long at most.
EXPORT_S = 3.0

#: `exported`, `dropped` or `failed`, and how many.
Count = Callable[[str, int], None]


class Exporter(Protocol):
    """Blocks until the spans are there or given up; answers something whose name is SUCCESS or FAILURE."""

    def export(self, spans: Sequence[ReadableSpan]) -> Any: ...

    def shutdown(self) -> None: ...


class SpanQueue:
    """The SDK's seam for ended spans (a `SpanProcessor` by its methods)."""

    def __init__(self, exporter: Exporter, count: Count) -> None:
        self._exporter = exporter
        self._count = count
        self._waiting: list[ReadableSpan] = []
        self._wake = asyncio.Event()
        self._stopping = False
        #: What was said last, so that each is said once until it is over.
        self._failing = self._dropping = False

    # -- the SDK calls these in the event loop

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Nothing to do before its end."""

    def _on_ending(self, span: Span) -> None:
        """Part of the SDK's seam."""

    def on_end(self, span: ReadableSpan) -> None:
        """Never waits and never fails."""
        if len(self._waiting) >= MAX_WAITING:
            self._count("dropped", 1)
            self._tell_drop()
            return
        self._waiting.append(span)
        if len(self._waiting) == BATCH:
            self._wake.set()

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 0) -> bool:  # noqa: ARG002 - the SDK's signature
        return not self._waiting

    # -- the proxy calls these

    async def run(self) -> None:
        """Send what comes, until `stop`; then what is left, as far as one batch's time goes."""
        while not self._stopping:
            await self._rest()
            await self._flush()

    def stop(self) -> None:
        """Nothing more will come."""
        self._stopping = True
        self._wake.set()

    async def _rest(self) -> None:
        try:
            async with asyncio.timeout(FLUSH_S):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()

    async def _flush(self) -> None:
        well = True
        while self._waiting and well:
            batch, self._waiting = self._waiting[:BATCH], self._waiting[BATCH:]
            result = await asyncio.to_thread(self._exporter.export, batch)
            well = result.name == "SUCCESS"
            self._count("exported" if well else "failed", len(batch))
            self._tell(well, len(batch))
        self._dropping = False

    def _tell(self, well: bool, spans: int) -> None:
        if well and self._failing:
            log("trace_export_resumed")
        elif not well and not self._failing:
            log("trace_export_failed", level=logging.WARNING, spans=spans, reason="the collector did not take them")
        self._failing = not well

    def _tell_drop(self) -> None:
        if not self._dropping:
            log("trace_spans_dropped", level=logging.WARNING, reason="the collector does not keep up")
        self._dropping = True
