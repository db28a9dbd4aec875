"""A sidecar that is killed again and again: `tune_live`, as the command line calls it, in a process forked for it.

Owns the process and a proxy's admin listener that always has new samples, so that a generation takes milliseconds.
A fork server with everything imported starts a sidecar in a twentieth of the time that an interpreter takes; what runs
and what is killed is the same.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import httpx
from aiohttp import web

from gorgo.cli.app import run_until_stopped
from tests.tuner.sidecar.fake_proxy import PAPER, FakeProxy
from tuner.commands import tune_live

#: More than a window of `PAPER`, so that each look at the proxy ends a generation or two.
SAMPLES_PER_LOOK = 10
POLL_S = 0.005
#: Never over, however many generations 200 lives have; random search does not converge either.
CAMPAIGN = replace(PAPER, max_generations=1_000_000)
_FORKS = get_context("forkserver")
#: What a sidecar imports on its way comes along.
_FORKS.set_forkserver_preload([__name__, "anyio._backends._asyncio", "httpcore", "numpy.random", "sqlite3"])


def start_forks() -> None:
    """Return when the fork server has imported everything."""
    first = _FORKS.Process(target=os.getpid)
    first.start()
    first.join()
    first.close()


def sidecar(url: str, folder: Path) -> ForkServerProcess:
    """Started."""
    process = _FORKS.Process(target=_run, args=(url, str(folder)), daemon=True)
    process.start()
    return process


def _run(url: str, folder: str) -> None:
    """In the forked process; what it says goes to a file."""
    said = os.open(f"{folder}/tune.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(said, 1)
    os.dup2(said, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr] # a text stream, in a process of our own
    database = f"sqlite:///{folder}/history.sqlite3"

    async def program(stop: asyncio.Event) -> None:
        await tune_live(
            stop,
            campaign=CAMPAIGN,
            url=url,
            token="t",
            database=database,
            algorithm="random",
            seed=1,
            poll_s=POLL_S,
        )

    run_until_stopped(program)


@asynccontextmanager
async def admin_listener(proxy: FakeProxy) -> AsyncIterator[str]:
    """`proxy` over HTTP, with new samples at each look."""

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/admin/samples":
            proxy.serve(SAMPLES_PER_LOOK)
        asked = httpx.Request(request.method, str(request.url), content=await request.read())
        said = proxy.handle(asked)
        return web.Response(status=said.status_code, body=said.content, content_type="application/json")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()
