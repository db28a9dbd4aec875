"""A server that answers each path with a status, for what checks replicas."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web


@asynccontextmanager
async def answering(status_of: Callable[[str], int]) -> AsyncIterator[str]:
    """Yield the URL of a server that answers a path with its status of the moment."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=status_of(request.path), headers={"location": "http://127.0.0.1:1/"})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
