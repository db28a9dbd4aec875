"""A collector: takes OTLP over HTTP on loopback and decodes what it was sent with OpenTelemetry's own messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True, slots=True)
class Received:
    """One span as it came."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    start_ns: int
    end_ns: int
    failed: bool
    attributes: dict[str, Any]


@dataclass
class Collector:
    """What came, whole; `statuses` are answered one after another, the last one for ever."""

    statuses: list[int] = field(default_factory=lambda: [200])
    bodies: list[bytes] = field(default_factory=list)
    spans: list[Received] = field(default_factory=list)
    resources: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    #: It answers nothing before this is set.
    open: asyncio.Event = field(default_factory=asyncio.Event)
    port: int = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1/traces"

    async def take(self, request: web.Request) -> web.Response:
        body = await request.read()
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        self.bodies.append(body)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        if status == 200:
            self._decode(body)
        self.arrived.set()
        await self.open.wait()
        return web.Response(status=status)

    def _decode(self, body: bytes) -> None:
        message = ExportTraceServiceRequest.FromString(body)
        for resource in message.resource_spans:
            self.resources.append(_attributes(resource.resource.attributes))
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.append(
                        Received(
                            span.name,
                            span.trace_id.hex(),
                            span.span_id.hex(),
                            span.parent_span_id.hex(),
                            span.kind,
                            span.start_time_unix_nano,
                            span.end_time_unix_nano,
                            span.status.code == span.status.STATUS_CODE_ERROR,
                            _attributes(span.attributes),
                        )
                    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


@asynccontextmanager
async def collecting(*statuses: int) -> AsyncIterator[Collector]:
    """A collector that listens until the end of the block."""
    collector = Collector(list(statuses) or [200])
    collector.open.set()
    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/traces", collector.take)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    collector.port = runner.addresses[0][1]
    try:
        yield collector
    finally:
        await runner.cleanup()
