"""Signals that end a command: SIGTERM as Ctrl-C for what has something to undo, or both as a value to wait for."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """SIGTERM raises `KeyboardInterrupt` meanwhile. For the main thread, as all that is about signals."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def stop_signals() -> Iterator[asyncio.Future[signal.Signals]]:
    """Yield a future of the running loop that gets the first SIGINT or SIGTERM; later ones change nothing."""
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[signal.Signals] = loop.create_future()

    def receive(number: signal.Signals) -> None:
        if not stop.done():
            stop.set_result(number)

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, receive, number)
    try:
        yield stop
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
