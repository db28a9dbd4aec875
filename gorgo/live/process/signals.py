"""Signals of a process: the first stops it in order, the second at once, SIGHUP reloads."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gorgo.live.reload.file_watch import ConfigFile


@contextmanager
def stop_signals(file: ConfigFile | None) -> Iterator[tuple[asyncio.Event, asyncio.Event]]:
    """Yield (stop, stop_now), set by the first and the second SIGTERM or SIGINT. SIGHUP requests a reload."""
    stop, stop_now = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        (stop_now if stop.is_set() else stop).set()

    handlers: dict[signal.Signals, Callable[[], object]] = {signal.SIGTERM: on_signal, signal.SIGINT: on_signal}
    if file is not None:
        handlers[signal.SIGHUP] = file.request_reload
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        yield stop, stop_now
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)
