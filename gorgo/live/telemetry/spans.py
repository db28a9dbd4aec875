"""The spans of traced requests, by OpenTelemetry, and their export. Imported only if a collector is configured.

Owns the traces (`Tracing`), the export within bounds (`SpanExport`), and the start of both.

Theory of operation. A valid `traceparent` decides whether a request is traced; without one chance does. An untraced
request costs nothing more, and its headers pass unchanged. Each attempt of a traced request is a span, and the replica
gets its id as `traceparent`. Clients start a bounded number of traces a second, and so displace no other spans. Times
are the proxy's clock; no context is attached, so tasks share nothing.

Attributes are ids, names of the configuration, numbers and constants, by OpenTelemetry's conventions for generative AI
where those have a name. Never a header, a key or a prompt. The model is named only if a replica lists it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span, SpanContext, SpanKind, StatusCode, Tracer, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from gorgo import __version__
from gorgo.core.latency.ttft import TtftParts
from gorgo.core.messages.actions import Dispatch
from gorgo.core.messages.request import AttemptResult, Outcome
from gorgo.live.http.headers import Header
from gorgo.live.logs import log
from gorgo.live.telemetry.metric_table import OPERATIONS, PROVIDER

# The export of spans: OpenTelemetry's batch processor with the proxy's bounds.
#
# A failing collector is counted and logged once, and cannot delay the end of the process beyond `EXPORT_S` per batch.


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


TRACEPARENT, TRACESTATE = b"traceparent", b"tracestate"
#: Traces that clients may start in a second: some 400 spans, beside which those of other requests fit into the queue.
CLIENT_TRACES_PER_S = 100


class Tracing:
    """Starts traces.

    Parameters
    ----------
    sample_ratio:
        Traced share of requests without `traceparent`.
    """

    def __init__(self, tracer: Tracer, export: SpanExport, sample_ratio: float) -> None:
        self._tracer = tracer
        self._ratio = sample_ratio
        self._chance = random.Random()
        self._second, self._started = 0.0, 0
        self._propagator = TraceContextTextMapPropagator()
        self.export = export
        #: Returns what is known of a replica: its engine, host and port. Set once the fleet is built.
        self.describe: Callable[[str], Mapping[str, str | int]] = _nothing_known

    def start(
        self, headers: Sequence[Header], *, route: str, request_id: str, received_s: float, ahead_s: float = 0.0
    ) -> Trace | None:
        """Return the trace of a request, `None` if it is not traced. `ahead_s` is added to all its times."""
        parent = self._parent(headers)
        if parent is not None and not _is_sampled(parent):
            return None
        if (parent is None or not self._grants(received_s)) and self._chance.random() >= self._ratio:
            return None
        return Trace(
            self._tracer,
            parent,
            route=route,
            request_id=request_id,
            received_s=received_s,
            describe=self.describe,
            ahead_s=ahead_s,
        )

    def _grants(self, now: float) -> bool:
        """Return whether a client may start a trace; beyond `CLIENT_TRACES_PER_S` the ratio decides."""
        if not 0.0 <= now - self._second < 1.0:
            self._second, self._started = now, 0
        self._started += 1
        return self._started <= CLIENT_TRACES_PER_S

    def _parent(self, headers: Sequence[Header]) -> Context | None:
        """Return the context of a valid `traceparent`, else `None`."""
        parents = [value for name, value in headers if name == TRACEPARENT]
        if len(parents) != 1:
            return None
        states = [value.decode("latin-1") for name, value in headers if name == TRACESTATE]
        carrier = {"traceparent": parents[0].decode("latin-1"), "tracestate": ",".join(states)}
        context = self._propagator.extract(carrier)
        return context if _span_context(context).is_valid else None


class Trace:
    """The spans of one request."""

    __slots__ = (
        *("_ahead_s", "_attempts", "_continues", "_decided_from_s", "_describe", "_operation", "_root", "_tracer"),
    )

    def __init__(
        self,
        tracer: Tracer,
        parent: Context | None,
        *,
        route: str,
        request_id: str,
        received_s: float,
        describe: Callable[[str], Mapping[str, str | int]] | None = None,
        ahead_s: float = 0.0,
    ) -> None:
        self._tracer = tracer
        self._ahead_s = ahead_s
        self._describe = describe or _nothing_known
        operation = OPERATIONS.get(route)
        self._operation = {} if operation is None else {"gen_ai.operation.name": operation}
        self._continues = parent is not None
        self._decided_from_s = received_s
        #: Open attempts by id, at most two.
        self._attempts: dict[str, Span] = {}
        self._root = tracer.start_span(
            f"POST {route}",
            context=Context() if parent is None else parent,
            kind=SpanKind.SERVER,
            start_time=self._ns(received_s),
            attributes={
                "http.request.method": "POST",
                "http.route": route,
                "gorgo.request_id": request_id,
                "gen_ai.provider.name": PROVIDER,
                **self._operation,
            },
        )

    def _ns(self, seconds: float) -> int:
        """Return nanoseconds since the epoch, as OpenTelemetry counts."""
        return int((seconds + self._ahead_s) * 1e9)

    def body_read(self, now: float) -> None:
        """Start the decision's span: the body is read."""
        self._decided_from_s = now

    def attempt_started(self, dispatch: Dispatch, *, model: str | None = None) -> None:
        """Record a decision and start its attempt. `model` is what the client asked for, if a replica lists it."""
        attributes = {} if model is None else {"gen_ai.request.model": model}
        self._root.set_attributes(attributes)
        decision = dispatch.decision
        decided_ns = self._ns(decision.decided_s)
        span = self._child("decision", self._root, min(self._decided_from_s, decision.decided_s))
        span.set_attributes(_decision_attributes(dispatch))
        span.end(decided_ns)
        # A retry is decided in the step in which the attempt before ended.
        self._decided_from_s = decision.decided_s
        attempt = self._child("attempt", self._root, decision.decided_s, kind=SpanKind.CLIENT)
        attempt.set_attributes(
            {
                "gorgo.replica": dispatch.replica,
                "gorgo.region": dispatch.region,
                "gorgo.attempt": dispatch.attempt,
                **self._operation,
                **attributes,
                **self._describe(dispatch.replica),
            }
        )
        self._attempts[dispatch.attempt_id] = attempt

    @property
    def dropped(self) -> tuple[bytes, ...]:
        """The client's headers that no replica gets: `tracestate` belongs to the client's trace."""
        return (TRACEPARENT,) if self._continues else (TRACEPARENT, TRACESTATE)

    def carry(self, headers: Iterable[Header], attempt_id: str) -> list[Header]:
        """Return the headers for the replica, with the attempt's span as parent."""
        context, dropped = self._attempts[attempt_id].get_span_context(), self.dropped
        parent = b"00-%032x-%016x-%02x" % (context.trace_id, context.span_id, context.trace_flags & 1)
        return [*(pair for pair in headers if pair[0] not in dropped), (TRACEPARENT, parent)]

    def first_content(self, dispatch: Dispatch, *, now: float, parts: TtftParts) -> None:
        """Record the first content of the winning attempt."""
        attempt = self._attempts[dispatch.attempt_id]
        span = self._child("first content", attempt, dispatch.decision.decided_s)
        span.set_attributes({f"gorgo.ttft_{part}_ms": value for part, value in parts.as_ms().items()})
        span.end(self._ns(now))
        self._root.set_attribute("gorgo.ttft_ms", sum(parts) * 1e3)

    def attempt_ended(self, dispatch: Dispatch, outcome: Outcome, *, now: float) -> None:
        """End the span of an attempt."""
        span = self._attempts.pop(dispatch.attempt_id)
        span.set_attribute("gorgo.result", outcome.result.value)
        attributes = {
            "http.response.status_code": outcome.status,
            "gen_ai.usage.input_tokens": outcome.prompt_tokens,
            "gen_ai.usage.output_tokens": outcome.output_tokens,
            "gen_ai.usage.cache_read.input_tokens": outcome.cached_tokens,
            "gorgo.cached_tokens": outcome.cached_tokens,
            "error.type": outcome.error,
        }
        span.set_attributes({name: value for name, value in attributes.items() if value is not None})
        if outcome.result.failed or outcome.result is AttemptResult.DEADLINE_EXCEEDED:
            _mark_failed(span)
        span.end(self._ns(now))

    def close(self, *, status: int, code: str | None, retries: int, hedged: bool, now: float) -> None:
        """End the span of the request."""
        self._root.set_attributes(
            {"http.response.status_code": status, "gorgo.retries": retries, "gorgo.hedged": hedged}
        )
        if code is not None:
            self._root.set_attribute("error.type", code)
        if status >= 500:
            _mark_failed(self._root)
        self._root.end(self._ns(now))

    def _child(self, name: str, parent: Span, start_s: float, kind: SpanKind = SpanKind.INTERNAL) -> Span:
        return self._tracer.start_span(
            name, context=set_span_in_context(parent), kind=kind, start_time=self._ns(start_s)
        )


def _nothing_known(replica: str) -> Mapping[str, str | int]:  # noqa: ARG001
    return {}


def _decision_attributes(dispatch: Dispatch) -> dict[str, str | int | float]:
    decision = dispatch.decision
    index = list(decision.candidates).index(decision.replica)
    attributes: dict[str, str | int | float | None] = {
        "gorgo.policy": decision.policy,
        "gorgo.replica": decision.replica,
        "gorgo.region": dispatch.region,
        "gorgo.weights_version": decision.weights_version,
        "gorgo.candidates": len(decision.candidates),
        "gorgo.prompt_tokens": decision.prompt_tokens,
        "gorgo.estimated_cached_tokens": decision.estimated_cached_tokens,
        "gorgo.best_cached_tokens": decision.best_cached_tokens,
        "gorgo.predicted_ttft_ms": None if decision.predicted_ttft_s is None else decision.predicted_ttft_s * 1e3,
        "gorgo.fallback": decision.fallback,
        "gorgo.unit": decision.unit or None,
        "gorgo.cost": None if decision.cost is None else float(decision.cost[index]),
    }
    attributes |= {f"gorgo.term.{name}": float(column[index]) for name, column in decision.terms.items()}
    return {name: value for name, value in attributes.items() if value is not None and value == value}


def _is_sampled(context: Context) -> bool:
    return bool(_span_context(context).trace_flags.sampled)


def _span_context(context: Context) -> SpanContext:
    return get_current_span(context).get_span_context()


def _mark_failed(span: Span) -> None:
    span.set_status(StatusCode.ERROR)


def start_tracing(endpoint: str, sample_ratio: float, *, region: str, count: Count) -> Tracing:
    """Return the tracing to a collector.

    Headers for the collector come from `OTEL_EXPORTER_OTLP_HEADERS`, never from the file.
    """
    # `SpanExport` logs a failing collector once, in the proxy's own form.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    export = SpanExport(OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_S), count)
    resource = Resource.create({"service.name": "gorgo", "service.version": __version__, "cloud.region": region})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(export)
    return Tracing(provider.get_tracer("gorgo", __version__), export, sample_ratio)
