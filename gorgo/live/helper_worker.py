"""The inner end of a helper process: how its jobs and answers are framed, and the loop that does the jobs.

Owns the form of what passes over the two pipes and the life of the process inside. `helper_process` is the other end.
It imports nothing of asyncio, so that a process starts quickly.

Theory of operation. Everything that passes is a frame: eight bytes of length, then that many bytes. First comes a
pickled pair: how far the process goes below its parent's priority, and the value which prepares the work. Then each job
is a fixed number of frames, whose bytes are the worker's matter. Its answers are pickled, one per frame, and an empty
frame ends them. Both ends are this program's own. The process ends as soon as nobody can write jobs any longer, in the
middle of a job too, so it never outlives its parent. It ignores the signals that stop its parent, which may still need
it.
"""

from __future__ import annotations

import os
import pickle
import resource
import select
import signal
import struct
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, BinaryIO

#: Length of a frame.
LENGTH = struct.Struct("!Q")

#: Does one job: takes the bytes of its frames, yields its answers.
Work = Callable[..., Iterable[Any]]


def frame(data: bytes) -> bytes:
    """Return bytes with their length before them."""
    return LENGTH.pack(len(data)) + data


def pickled(value: object) -> bytes:
    """Return a value as the bytes of a frame."""
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def read_frame(source: BinaryIO) -> bytes | None:
    """Return the bytes of the next frame; `None` at the end of the input, within a frame too."""
    head = source.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    data = source.read(size)
    return data if len(data) == size else None


def do_jobs(prepare: Callable[[Any], Work], frames: int, jobs: BinaryIO, answers: BinaryIO) -> None:
    """Do jobs of `frames` frames until `jobs` ends. `prepare` gets the value and returns what does a job."""
    first = read_frame(jobs)
    if first is None:
        return
    niceness, value = pickle.loads(first)
    work = prepare(value)
    with suppress(OSError):  # a sandbox forbids the call
        os.nice(niceness)
    while True:
        job = [read_frame(jobs) for _ in range(frames)]
        if None in job:
            return
        for answer in work(*job):
            answers.write(frame(pickled(answer)))
        answers.write(frame(b""))
        answers.flush()


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


def run_worker(prepare: Callable[[Any], Work], *, frames: int, max_memory_bytes: int) -> None:
    """Do jobs on the standard streams, with at most `max_memory_bytes` of data."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_DATA, (max_memory_bytes, max_memory_bytes))
    end_with(sys.stdin.fileno())
    do_jobs(prepare, frames, sys.stdin.buffer, sys.stdout.buffer)
