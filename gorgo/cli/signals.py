"""Programs that run until SIGTERM or SIGINT, on uvloop where it is installed."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable


def run_until_stopped(program: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Run `program`; SIGTERM and SIGINT set the event that it gets as its argument."""

    async def run() -> None:
        stop = asyncio.Event()
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signal_number, stop.set)
        await program(stop)

    try:
        import uvloop
    except ImportError:  # it does not build everywhere
        asyncio.run(run())
    else:
        uvloop.run(run())
