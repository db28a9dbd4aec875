"""A router that speaks OpenAI's streaming chat over a real socket and does what a test tells it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

Answer = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]

HEADERS = {
    "x-gorgo-replica": "seoul-0",
    "x-gorgo-region": "ap-seoul",
    "x-gorgo-policy": "gorgo",
    "x-gorgo-weights-version": "3",
    "x-gorgo-predicted-ttft-ms": "12.5",
    "x-gorgo-estimated-cached-tokens": "512",
}


def event(data: object) -> bytes:
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


def token(text: str = "abcd") -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}}]})


def usage(prompt: int, cached: int | None, output: int) -> bytes:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    counts = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output, **details}
    return event({"choices": [], "usage": counts})


ROLE = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
DONE = b"data: [DONE]\n\n"


class FakeRouter:
    """Keeps what it was asked; answers with `answer`, by default a whole stream with usage and gorgo's headers."""

    def __init__(self, answer: Answer | None = None) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.request_headers: list[dict[str, str]] = []
        self.models: object = {"object": "list", "data": [{"id": "fake-model"}]}
        self.url, self.port = "", 0
        self._answer = answer or self.whole

    async def whole(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        tokens = body["max_tokens"]
        prompt = sum(len(message["content"]) for message in body["messages"]) // 4
        return await self.stream(request, ROLE, *[token()] * tokens, usage(prompt, prompt // 2, tokens), DONE)

    async def stream(
        self, request: web.Request, *parts: bytes, headers: dict[str, str] = HEADERS
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream", **headers})
        await response.prepare(request)
        for part in parts:
            await response.write(part)
        await response.write_eof()
        return response

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.request_headers.append({name.lower(): value for name, value in request.headers.items()})
        return await self._answer(request, body)

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response(self.models)

    @asynccontextmanager
    async def running(self, port: int = 0) -> AsyncIterator[FakeRouter]:
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", port, reuse_address=True)
            await site.start()
            self.port = runner.addresses[0][1]
            self.url = f"http://127.0.0.1:{self.port}"
            yield self
        finally:
            await runner.cleanup()


async def never(_request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
    """Does not answer."""
    await asyncio.Event().wait()
    raise AssertionError
