"""A process of this program that computes beside the event loop, spoken to over its standard streams.

Owns its start and end. It runs below the proxy's priority, and its environment has no keys or tokens.
"""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress

#: Variables of the environment that such a process needs. The others have keys and tokens, which it does not.
_PASSED = ("PATH", "LANG", "LD_LIBRARY_PATH")
#: One thread for sums: numpy's library and LightGBM's start one per processor.
_ONE_THREAD = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")


async def start_helper(module: str, *, niceness: int) -> Process:
    """Start `python -m module`; `niceness` is added to the proxy's own.

    SCHED_IDLE is not used: no gain was certain in five measurements, and it never runs where processors are full.
    """
    environ = {name: value for name, value in os.environ.items() if name in _PASSED or name.startswith("PYTHON")}
    environ |= dict.fromkeys(_ONE_THREAD, "1")
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", module, stdin=PIPE, stdout=PIPE, env=environ)
    with suppress(OSError):  # it has ended, or a sandbox forbids the call
        own = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, process.pid, own + niceness)
    return process


async def end_helper(process: Process) -> None:
    """Kill the process and wait for its end."""
    with suppress(ProcessLookupError):
        process.kill()
    await process.wait()
    assert process.stdin is not None
    process.stdin.close()
