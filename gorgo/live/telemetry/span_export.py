"""The export of spans: OpenTelemetry's batch processor with the proxy's bounds.

A failing collector is counted and logged once, and cannot delay the end of the process beyond `EXPORT_S` per batch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from gorgo.live.logs import log

#: Queued spans: some 500 requests, a few MB. Beyond it the oldest is dropped.
MAX_WAITING = 2048
#: Sent at once: half a megabyte.
BATCH = 512
#: Between two sends, s; a full batch does not wait.
FLUSH_S = 2.0
#: Deadline of one batch with all retries, s. A stopping proxy waits for two of them if the collector fails.
EXPORT_S = 3.0

#: `exported` or `failed`, and how many.
Count = Callable[[str, int], None]


class SpanExport(BatchSpanProcessor):
    """The SDK's batch processor over `exporter`, which has `EXPORT_S` for a batch."""

    def __init__(self, exporter: SpanExporter, count: Count) -> None:
        self._watched = _WatchedExporter(exporter, count)
        super().__init__(
            self._watched,
            max_queue_size=MAX_WAITING,
            schedule_delay_millis=FLUSH_S * 1e3,
            max_export_batch_size=BATCH,
        )

    async def aclose(self) -> None:
        """Send queued spans, up to the first batch that fails."""
        self._watched.closing = True
        await asyncio.to_thread(self.shutdown)


class _WatchedExporter(SpanExporter):
    """Count exported and failed spans; log the first failure and the first success after it.

    Called by the processor's thread alone, which is the only writer of the two counters.
    """

    def __init__(self, exporter: SpanExporter, count: Count) -> None:
        self.closing = False
        self._exporter = exporter
        self._count = count
        self._failing = self._given_up = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE if self._given_up else self._exporter.export(spans)
        succeeded = result is SpanExportResult.SUCCESS
        self._given_up = self.closing and not succeeded
        self._count("exported" if succeeded else "failed", len(spans))
        if succeeded and self._failing:
            log("trace_export_resumed")
        elif not succeeded and not self._failing:
            reason = "the collector refused them or did not answer"
            log("trace_export_failed", level=logging.WARNING, spans=len(spans), reason=reason)
        self._failing = not succeeded
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()
