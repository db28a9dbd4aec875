"""A process of this program that computes beside the event loop: its start, its jobs, its failures and its end.

Owns the life of one process, seen from the event loop. `helper_worker` is the end inside the process, and owns the form
of what passes between them.

Theory of operation. The process starts with its first job, without the keys and tokens of the environment. It goes
below the proxy's priority once it has started: a start takes a quarter of a second of processor time, of which a
process below the others would get a hundredth where ten of them run on each core. Jobs are done one after the other.
There is one way to fail: the process has ended. One that is stopped, or frozen, or takes too long over an answer is
killed by a timer, which is its end. A job in progress at an end is done again by a new process, once, because a job
that ends every process must not be repeated for ever. A helper that has a state of its own (`again=False`) cannot do
that: its owner learns of the failure and starts another.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import sys
from asyncio.subprocess import PIPE, Process, SubprocessStreamProtocol
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

from gorgo.live.helper_worker import LENGTH, frame, pickled
from gorgo.live.logs import log

#: Variables of the environment that such a process needs. The others have keys and tokens, which it does not.
_PASSED = ("PATH", "LANG", "LD_LIBRARY_PATH")
#: One thread for sums: numpy's library and LightGBM's start one per processor.
_ONE_THREAD = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")
#: Written at once: as much of a job as the pipe and the event loop have to copy in one turn.
PIECE_BYTES = 256 * 1024
#: Read ahead of whoever takes the answers: asyncio's own bound, and twice this at most.
READ_BYTES = 64 * 1024
#: Between two checks of a process that has a job.
CHECK_S = 1.0
#: Checks in a row that find no processor time used, after which the process counts as stopped. The kernel gives every
#: process that can run some time within a second, whatever its priority.
STILL_CHECKS = 5


class HelperFailed(Exception):  # noqa: N818 - what happened, as CancelledError
    """The process has ended, or could not be started. The message says how, as what follows "the process"."""


class HelperTooSlow(HelperFailed):
    """The process was ended because it computed for too long, as it would again."""


class HelperProcess:
    """One helper. Its process is replaced after a failure, by the next job.

    Parameters
    ----------
    module:
        Run as `python -m module`; it calls `run_worker`.
    niceness:
        Added to the proxy's own. SCHED_IDLE is not used: no gain was certain in five measurements, and it never runs
        where processors are full.
    timeout_s:
        Longest wait for one answer, the start of the process and the passing of the job included.
    first:
        The value that each process starts with.
    again:
        Whether a job that fails is done once more, by a new process.
    """

    def __init__(
        self, module: str, *, niceness: int, timeout_s: float, first: object = None, again: bool = True
    ) -> None:
        self._module = module
        self._niceness = niceness
        self._timeout_s = timeout_s
        self._first = first
        self._again = again
        self._process: Process | None = None
        #: Of the process, to close its pipes.
        self._transport: asyncio.SubprocessTransport | None = None
        self._lock = asyncio.Lock()
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Return the id of the process; `None` unless it runs."""
        return None if self._process is None else self._process.pid

    async def answer(self, *job: bytes) -> Any:
        """Do a job that has one answer, and return it. Raises `HelperFailed`."""
        (answer,) = [each async for each in self.answers(*job)]
        return answer

    async def answers(self, *job: bytes) -> AsyncGenerator[Any, None]:
        """Do a job and yield its answers, each once. Raises `HelperFailed`. A cancelled job ends its process."""
        async with self._lock:
            given = 0
            for is_last in (False, True) if self._again else (True,):
                try:
                    async with aclosing(self._exchange(job)) as answers:
                        number = 0
                        async for answer in answers:
                            number += 1
                            if number > given:
                                given = number
                                yield answer
                    return
                except HelperTooSlow:
                    raise
                except HelperFailed as failure:
                    if is_last or self._closed:
                        raise
                    log("helper_process_failed", level=logging.WARNING, helper=self._module, reason=str(failure))

    async def aclose(self) -> None:
        """End the process for good: a job in progress fails, and no other one starts."""
        self._closed = True
        await self._end()

    async def _exchange(self, job: tuple[bytes, ...]) -> AsyncGenerator[Any, None]:
        """Pass a job to the process and yield its answers; the process is ended unless all of them came."""
        whole = False
        watch = _Watch(self._timeout_s)
        try:
            process = self._process or await self._start()
            assert process.stdout is not None
            with watch.waiting_for(process):
                for part in job:
                    await _send(process, part)
                data = await _read(process.stdout)
            while data:
                yield pickle.loads(data)
                with watch.waiting_for(process):
                    data = await _read(process.stdout)
            whole = True
        except (OSError, EOFError) as error:
            raise watch.failure or HelperFailed(_reason(error)) from None
        finally:
            if not whole:
                await self._end()

    async def _start(self) -> Process:
        if self._closed:
            raise HelperFailed("has been closed")
        environ = {name: value for name, value in os.environ.items() if name in _PASSED or name.startswith("PYTHON")}
        environ |= dict.fromkeys(_ONE_THREAD, "1")
        command = (sys.executable, "-m", self._module)
        loop = asyncio.get_running_loop()
        try:
            # As asyncio makes a `Process`, but with its transport: nothing else closes a pipe that is not read.
            transport, protocol = await loop.subprocess_exec(
                lambda: SubprocessStreamProtocol(READ_BYTES, loop),
                *command,
                stdin=PIPE,
                stdout=PIPE,
                stderr=None,
                env=environ,
            )
        except OSError as error:
            raise HelperFailed(f"could not be started: {error}") from None
        self._transport = transport
        self._process = process = Process(transport, protocol, loop)
        assert process.stdin is not None
        process.stdin.write(frame(pickled((self._niceness, self._first))))
        return process

    async def _end(self) -> None:
        process, self._process = self._process, None
        transport, self._transport = self._transport, None
        if process is None or transport is None:
            return
        with suppress(ProcessLookupError):
            process.kill()  # which ends a stopped one too
        # Answers that nobody reads would hold a pipe open, and `wait` waits for the end of the pipes. The transport as
        # a whole is not closed: that may take the exit status, for which asyncio's watcher waits.
        for fd in (0, 1):
            pipe = transport.get_pipe_transport(fd)
            if pipe is not None:
                pipe.close()
        await process.wait()


class _Watch:
    """Kills a process that uses no processor time, or all of its time, while an answer is waited for."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._process: Process | None = None
        self._ends_s = 0.0
        self._used: bytes | None = None
        self._still = 0
        self._timer: asyncio.TimerHandle | None = None
        #: Why the process was killed.
        self.failure: HelperFailed | None = None

    def waiting_for(self, process: Process) -> _Watch:
        """Watch the process within a `with` block."""
        self._process = process
        return self

    def __enter__(self) -> None:
        loop = asyncio.get_running_loop()
        self._ends_s = loop.time() + self._timeout_s
        self._used, self._still = None, 0
        self._timer = loop.call_later(min(CHECK_S, self._timeout_s), self._check)

    def __exit__(self, *_: object) -> None:
        assert self._timer is not None
        self._timer.cancel()

    def _check(self) -> None:
        assert self._process is not None
        loop = asyncio.get_running_loop()
        left_s = self._ends_s - loop.time()
        used, before = _processor_time(self._process.pid), self._used
        self._used = used
        self._still = self._still + 1 if used is not None and used == before else 0
        if self._still >= STILL_CHECKS:
            self.failure = HelperFailed(f"used no processor time for {STILL_CHECKS * CHECK_S:g} s")
        elif left_s <= 0.0:
            self.failure = HelperTooSlow(f"had no answer within {self._timeout_s:g} s")
        else:
            self._timer = loop.call_later(min(CHECK_S, left_s), self._check)
            return
        with suppress(ProcessLookupError):
            self._process.kill()


def _processor_time(pid: int) -> bytes | None:
    """Return something that is another as soon as the process has run; `None` where the system does not say.

    It is the time of its first thread, which does its work, in ns.
    """
    try:
        return Path(f"/proc/{pid}/schedstat").read_bytes().split()[0]
    except (OSError, IndexError):
        return None


def _reason(error: OSError | EOFError) -> str:
    return "ended" if isinstance(error, EOFError | ConnectionError) else f"failed: {error}"


async def _send(process: Process, data: bytes) -> None:
    """Write one frame, in pieces, so that the event loop copies little at once and a body is not held twice."""
    stdin = process.stdin
    assert stdin is not None
    stdin.write(LENGTH.pack(len(data)))
    pieces = memoryview(data)
    for start in range(0, len(data), PIECE_BYTES):
        stdin.write(bytes(pieces[start : start + PIECE_BYTES]))
        await stdin.drain()


async def _read(stdout: asyncio.StreamReader) -> bytes:
    """Return the bytes of one frame. Raises `EOFError` at the end."""
    (size,) = LENGTH.unpack(await stdout.readexactly(LENGTH.size))
    return await stdout.readexactly(size)
