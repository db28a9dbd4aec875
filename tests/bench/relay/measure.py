"""What a process and its children cost, read from /proc: CPU seconds of all threads, and resident memory.

CPU time is the figure to trust on a machine that others use too; schedstat counts it in nanoseconds.
"""

from __future__ import annotations

import os
import platform
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_PROC = Path("/proc")
_LOAD_CORE, _RELAY_CORE = 0, 1


def process_tree(root: int) -> list[int]:
    """`root` and every process below it."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and (stat := _read(entry / "stat")):
            children[int(stat.rpartition(")")[2].split()[1])].append(int(entry.name))
    found, waiting = [], [root]
    while waiting:
        process = waiting.pop()
        found.append(process)
        waiting += children[process]
    return found


def cpu_times(processes: Iterable[int]) -> tuple[float, float]:
    """Seconds that the living threads of `processes` have run, and have waited for a core that others had."""
    files = (file for process in processes for file in _PROC.glob(f"{process}/task/*/schedstat"))
    times = [text.split() for file in files if (text := _read(file))]
    return sum(int(ran) for ran, _, _ in times) / 1e9, sum(int(waited) for _, waited, _ in times) / 1e9


def relay_times(processes: Sequence[int]) -> tuple[float, float, float]:
    """Return what `cpu_times` does of all of them, and the first one's seconds between both."""
    ran_s, waited_s = cpu_times(processes)
    # Most relays are one process: its threads are read once.
    first_s = cpu_times(processes[:1])[0] if len(processes) > 1 else ran_s
    return ran_s, first_s, waited_s


def resident_bytes(processes: Iterable[int]) -> int:
    """Resident memory; pages that several of `processes` share count once for each."""
    texts = (_read(_PROC / str(process) / "status") for process in processes)
    lines = (line for text in texts for line in text.splitlines() if line.startswith("VmRSS:"))
    return sum(int(line.split()[1]) for line in lines) * 1024


@contextmanager
def on_load_core() -> Iterator[None]:
    """Processes started inside share the core of the engine and the load."""
    with _pinned(_LOAD_CORE):
        yield


@contextmanager
def on_relay_core() -> Iterator[None]:
    """Processes started inside run on the relays' core, so that the load does not take their time."""
    with _pinned(_RELAY_CORE):
        yield


def describe_machine() -> str:
    """Processor, cores, kernel, Python and how busy the machine is, on one line."""
    cpu = next((line for line in _read(_PROC / "cpuinfo").splitlines() if line.startswith("model name")), "? : ?")
    load = os.getloadavg()[0]
    return (
        f"{cpu.partition(':')[2].strip()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}, load average {load:.1f}"
    )


@contextmanager
def _pinned(core: int) -> Iterator[None]:
    # A child inherits the mask of the thread that starts it: no race with threads that it starts itself.
    allowed = os.sched_getaffinity(0)
    if len(allowed) > 1:
        os.sched_setaffinity(0, {sorted(allowed)[core]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except (FileNotFoundError, ProcessLookupError):  # it ended between the listing and the reading
        return ""
