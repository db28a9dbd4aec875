"""A helper process for tests: what it does with a job is in the job's first frame."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gorgo.live.helper_worker import Work, run_worker

#: Signals by which a job ends or stops its own process.
SIGNALS = {b"killed": signal.SIGKILL, b"stopped": signal.SIGSTOP}
#: What a stream of asyncio reads ahead (128 KiB) when the file exists: a pipe may hold a page and no more.
SMALL_BYTES, FEW = 32 * 1024, 4
#: More than any pipe holds.
LARGE_BYTES = 4 * 1024 * 1024


def jobs(first: object) -> Work:
    """Return what does a job: a word and the path of a file, which exists once a process has begun such a job."""
    at_start = os.getpriority(os.PRIO_PROCESS, 0)

    def work(word: bytes, path: bytes) -> Iterator[Any]:
        yield first, os.getpid()
        if word in SIGNALS and not Path(path.decode()).exists():
            Path(path.decode()).touch()
            os.kill(os.getpid(), SIGNALS[word])
        elif word == b"many answers":
            yield from [bytes(SMALL_BYTES)] * FEW
            Path(path.decode()).touch()
            yield bytes(LARGE_BYTES)
        elif word == b"always killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif word == b"computes":
            end_s = time.process_time() + 60.0
            while time.process_time() < end_s:
                pass
        yield (at_start, os.getpriority(os.PRIO_PROCESS, 0)) if word == b"niceness" else word

    return work


if __name__ == "__main__":
    run_worker(jobs, frames=2, max_memory_bytes=1 << 30)
