"""A process that trains models: a round holds its process for seconds, and in this one nothing else waits for it.

Owns the loop of this process. See `process` for the other end.

Theory of operation. First come the settings. Then each message is some outcomes, and each gets one reply, with a model
if a round was due. The buffers are here alone; another process begins with the outcomes that the proxy still has. The
process ends at the end of its input, in the middle of a round too, so it never outlives its parent.

A busy neighbour costs the event loop caches and memory bandwidth, whatever its priority. So the process computes for a
slice and then pauses for three: a quarter of the requests meet it, and a round takes four times as long.
"""

from __future__ import annotations

import os
import pickle
import resource
import select
import signal
import sys
import threading
from collections.abc import Callable
from time import perf_counter, sleep
from typing import Any, BinaryIO

from gorgo.learning.model_file import dumps
from gorgo.learning.trainer import Trainer
from gorgo.live.training.messages import LENGTH, Reply, Settings, encode

#: Data of this process: numpy's libraries, and ten times the largest buffers.
MAX_MEMORY_BYTES = 2 << 30
#: Processor time between two pauses, and a pause, s.
SLICE_S, PAUSE_S = 0.01, 0.03


def work(messages: BinaryIO, replies: BinaryIO) -> None:
    """Train on what `messages` bring until they end."""
    settings: Settings | None = _read(messages)
    if settings is None:
        return
    trainer = Trainer(settings.spec, settings.seed, version=settings.version)
    while (rows := _read(messages)) is not None:
        trainer.add(rows)
        replies.write(encode(_round(trainer)))
        replies.flush()


def _round(trainer: Trainer) -> Reply:
    if not trainer.due():
        return Reply(trainer.report().as_dict())
    started = perf_counter()
    model = trainer.train()
    return Reply(trainer.report().as_dict(), dumps(model), perf_counter() - started)


def _read(messages: BinaryIO) -> Any:
    """Return the next message; `None` at the end."""
    head = messages.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    data = messages.read(size)
    return None if len(data) < size else pickle.loads(data)


def pace(pause: Callable[[float], object] = sleep) -> None:
    """Pause after each slice of processor time from here on; a call into a library is not interrupted."""
    signal.signal(signal.SIGVTALRM, lambda _number, _frame: pause(PAUSE_S))
    signal.setitimer(signal.ITIMER_VIRTUAL, SLICE_S, SLICE_S)


def end_with(fd: int, end: Callable[[int], object] = os._exit) -> threading.Thread:
    """Wait in a thread until nobody can write to the other side of `fd`, then end this process."""

    def wait() -> None:
        hung_up = select.poll()
        hung_up.register(fd, 0)  # of a hang-up alone
        hung_up.poll()
        end(0)

    thread = threading.Thread(target=wait, name="end with the proxy", daemon=True)
    thread.start()
    return thread


def main() -> None:
    """Work on the standard streams."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    pace()
    end_with(sys.stdin.fileno())
    work(sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
