"""A replica whose behaviour a test scripts request by request, and a client that sees every byte and its time.

The replica is a real server on a real socket, so that refusals, resets and half-sent answers are the real ones.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Script = Callable[[web.Request, bytes], Awaitable[web.StreamResponse]]


def event(payload: object) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def delta(text: str) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}}]})


ROLE = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
DONE = b"data: [DONE]\n\n"
USAGE = event(
    {
        "choices": [],
        "usage": {"prompt_tokens": 12, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 8}},
    }
)


@dataclass
class Seen:
    """One request as it reached the replica."""

    path: str
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes

    def header(self, name: str) -> list[str]:
        return [value.decode() for key, value in self.headers if key.decode().lower() == name]


@dataclass
class FakeReplica:
    """Scripted; the last script repeats."""

    scripts: list[Script] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    #: Set when a request has arrived, and when one was ended by its client.
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    dropped: asyncio.Event = field(default_factory=asyncio.Event)
    #: A script that hangs waits for this.
    release: asyncio.Event = field(default_factory=asyncio.Event)
    pings: int = 0
    #: Paths of the monitor's requests for round trips and models.
    monitored: list[str] = field(default_factory=list)
    metrics: str | None = None
    loads: object = None
    #: A path of its own on which it answers nothing until released.
    silent: str | None = None
    #: Answer to `/v1/models` for the proxy's monitor; None is a 404. Requests of clients go to the scripts.
    models: object = None
    #: Answers to the monitor's other requests, by path; without one it is a 404. `None`: they go to the scripts.
    described: dict[str, object] | None = field(default_factory=dict)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if request.path == "/tokenize" and (b'"add_special"' in body or b'"continue_final_message"' in body):
            return web.Response(status=404)  # a question of the proxy's own
        self.seen.append(Seen(request.path_qs, request.raw_headers, body))
        self.arrived.set()
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        try:
            return await script(request, body)
        except (asyncio.CancelledError, ConnectionError):
            self.dropped.set()
            raise

    async def ping(self, request: web.Request) -> web.Response:
        self.pings += 1
        self.monitored.append(request.path)
        await self._unless_silent(request)
        return web.Response()

    async def _unless_silent(self, request: web.Request) -> None:
        if request.path == self.silent:
            await self.release.wait()

    async def get_metrics(self, request: web.Request) -> web.Response:
        await self._unless_silent(request)
        return web.Response(status=404) if self.metrics is None else web.Response(text=self.metrics)

    async def get_loads(self, request: web.Request) -> web.Response:
        return web.Response(status=404) if self.loads is None else web.json_response(self.loads)

    async def get_models(self, request: web.Request) -> web.StreamResponse:
        if "x-request-id" in request.headers:
            return await self.handle(request)
        self.monitored.append(request.path)
        await self._unless_silent(request)
        return web.Response(status=404) if self.models is None else web.json_response(self.models)

    async def describe(self, request: web.Request) -> web.StreamResponse:
        if self.described is None:
            return await self.handle(request)
        found = self.described.get(request.path)
        return web.Response(status=404) if found is None else web.json_response(found)


REPLICA = web.AppKey("replica", FakeReplica)


@asynccontextmanager
async def running(*scripts: Script) -> AsyncIterator[FakeReplica]:
    """A replica that listens until the end of the block."""
    replica = FakeReplica(list(scripts))
    app = web.Application(client_max_size=1 << 30)
    app[REPLICA] = replica
    app.router.add_get("/ping", replica.ping)
    app.router.add_get("/metrics", replica.get_metrics)
    app.router.add_get("/v1/loads", replica.get_loads)
    app.router.add_get("/v1/models", replica.get_models)
    for path in ("/server_info", "/get_server_info", "/props"):
        app.router.add_get(path, replica.describe)
    app.router.add_route("*", "/{path:.*}", replica.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    replica.port = runner.addresses[0][1]
    try:
        yield replica
    finally:
        replica.release.set()
        await runner.cleanup()


def stream(*chunks: bytes, headers: dict[str, str] | None = None) -> Script:
    """An event stream of these chunks, each written by itself."""

    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream", **(headers or {})})
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
        await response.write_eof()
        return response

    return script


def answer(status: int, body: bytes = b"{}", headers: dict[str, str] | None = None) -> Script:
    """A whole answer with its length."""

    async def script(request: web.Request, _: bytes) -> web.StreamResponse:
        return web.Response(status=status, body=body, headers={"content-type": "application/json", **(headers or {})})

    return script


def hang(*chunks: bytes, rest: Sequence[bytes] = (), headers: dict[str, str] | None = None) -> Script:
    """Sends `chunks` (not even headers if there are none), waits until released, then sends `rest`."""

    async def script(request: web.Request, _: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream", **(headers or {})})
        if chunks:
            await response.prepare(request)
            for chunk in chunks:
                await response.write(chunk)
        await request.app[REPLICA].release.wait()
        if not chunks:
            await response.prepare(request)
        for chunk in rest:
            await response.write(chunk)
        return response

    return script


def reset_after(*chunks: bytes, headers: dict[str, str] | None = None) -> Script:
    """Sends `chunks`, then resets the connection."""

    async def script(request: web.Request, _: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream", **(headers or {})})
        if chunks or headers:
            await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
        assert request.transport is not None
        request.transport.abort()
        return response

    return script


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}], **fields}).encode()
