"""The memory that this process may use: the tightest limit of its control groups, else the machine's.

The default of `limits.max_buffered_bytes` is a share of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from gorgo.config.model import LimitsConfig

#: Share of the memory for buffered bytes. The rest: the process with a full prefix index, and other processes.
BUFFER_SHARE = 0.25
#: Where no limit can be read: a quarter of the smallest machine in use for a router, 2 GiB.
UNKNOWN_MEMORY_BUFFER_BYTES = 512 * 1024 * 1024


def max_buffered_bytes(limits: LimitsConfig) -> int:
    """Return the limit of buffered bytes: that of the file, else a share of the memory."""
    if limits.max_buffered_bytes is not None:
        return limits.max_buffered_bytes
    memory = memory_bytes()
    return UNKNOWN_MEMORY_BUFFER_BYTES if memory is None else int(memory * BUFFER_SHARE)


def memory_bytes(root: Path = Path("/")) -> int | None:
    """Return the memory that this process may use, None if unknown. `root` has the files of Linux."""
    found = [*_group_limits(root), *_physical(root)]
    return min(found) if found else None


def _group_limits(root: Path) -> Iterator[int]:
    """Yield the memory limits of the control groups of both versions, from the process's own to the outermost."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers not in ("", "memory") and "memory" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup"
        mount, name = (mount / "memory", "memory.limit_in_bytes") if controllers else (mount, "memory.max")
        group = PurePosixPath(path.lstrip("/"))
        for folder in (group, *group.parents):
            text = _read(mount / folder / name).strip()
            if text.isdigit():
                yield int(text)


def _physical(root: Path) -> Iterator[int]:
    """Yield the memory of the machine."""
    words = _read(root / "proc/meminfo").split()
    if words[:1] == ["MemTotal:"] and words[1].isdigit():
        yield int(words[1]) * 1024
    elif root == Path("/") and "SC_PHYS_PAGES" in os.sysconf_names:  # not Linux
        yield os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
