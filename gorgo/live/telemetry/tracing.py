"""The start of tracing: extra `otel`, imported only if `proxy.tracing` names a collector."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from gorgo import __version__
from gorgo.config.model import TracingConfig as TracingConfig
from gorgo.errors import MissingExtra

if TYPE_CHECKING:
    from gorgo.live.telemetry.spans import Count, Tracing


def require_extra() -> None:
    """Raise `MissingExtra` without the extra `otel`."""
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"proxy.tracing needs {error.name}, which is not installed: pip install 'gorgo-router[otel]'"
        ) from error


def make_tracing(config: TracingConfig, *, region: str, count: Count) -> Tracing | None:
    """Return the tracing of the configuration, `None` without an endpoint.

    Raises `MissingExtra` without the extra `otel`.

    Headers for the collector come from `OTEL_EXPORTER_OTLP_HEADERS`, never from the file.
    """
    if config.endpoint is None:
        return None
    require_extra()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    from gorgo.live.telemetry.spans import EXPORT_S, SpanExport, Tracing

    # `SpanExport` logs a failing collector once, in the proxy's own form.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    export = SpanExport(OTLPSpanExporter(endpoint=config.endpoint, timeout=EXPORT_S), count)
    resource = Resource.create({"service.name": "gorgo", "service.version": __version__, "cloud.region": region})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(export)
    return Tracing(provider.get_tracer("gorgo", __version__), export, config.sample_ratio)
