"""How a command ends: by a signal, or with the process that started it.

SIGTERM is as Ctrl-C for what has something to undo, or both are a value to wait for.

`python -m gorgo.lab.termination ...` is the `gorgo` command as a child that ends with its parent. The parent passes the
read end of a pipe as stdin and keeps the write end, which the operating system closes however the parent ends, also by
SIGKILL. Then the child sends itself SIGTERM, and SIGKILL if it has not ended in time.
"""

from __future__ import annotations

import asyncio
import os
import runpy
import signal
import sys
import threading
import time
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


#: As a parent gives its processes between SIGTERM and SIGKILL.
GRACE_S = 5.0
_STDIN = 0


def main() -> None:
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    sys.argv[0] = "gorgo"
    runpy.run_module("gorgo", run_name="__main__")


def _end_with_parent() -> None:
    os.read(_STDIN, 1)  # The parent writes nothing: returns at the end of the pipe.
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
