"""Puts the heap of a process that has settled into pages of 2 MiB.

A request reads some thousand objects all over the heap. With pages of 4 KiB the processor has to look up most of them
anew, in a virtual machine twice. Under `madvise`, the setting of many distributions, the kernel uses huge pages only
where a process names the memory, and its own thread exchanges them slowly. So the exchange is requested. It keeps the
contents in their place; a thread that needs one of the pages waits for a copy of 2 MiB. The heap grows with the first
requests and ever slower then, so each pause until the next exchange is twice as long. A page that is huge already stays
as it is. Nothing is exchanged where the operator has set `never`.
"""

from __future__ import annotations

import asyncio
import ctypes
import re
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

from gorgo.core.backoff import backoff_s

#: Pauses before the first exchange and between late ones, s: what is retained of requests grows for some minutes.
FIRST_S, LONGEST_S = 10.0, 600.0
PAGE_BYTES = 2 << 20
#: Share of a mapping that is in use, at least: a huge page would fill the rest, as of a thread's stack.
_DENSE = 0.75
#: Of linux/mman.h; since Linux 6.1, an error before.
_MADV_COLLAPSE = 25
_MAPPINGS = Path("/proc/self/smaps")
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
#: A mapping that is private, writable and of no file, behind its start and end, and how much of it is in use, kB. It
#: begins with fixed text, which is found in a quarter of the time: no stream
#: proceeds meanwhile.
_HEAP = re.compile(r" rw-p 0+ 00:00 0 *(?:\[heap\])?\n(?:[A-Z]\w+: .*\n)*?Rss: +(\d+) kB")

#: Takes start, length and advice; returns 0 if it was done.
Advise = Callable[[int, int, int], int]


async def use_huge_pages() -> None:
    """Exchange the pages of the heap now and then, in a thread."""
    for exchange in count(1):
        await asyncio.sleep(backoff_s(exchange, first_s=FIRST_S, longest_s=LONGEST_S))
        await asyncio.to_thread(collapse_heap)


def collapse_heap(mappings: Path = _MAPPINGS, setting: Path = _SETTING, madvise: Advise | None = None) -> int:
    """Exchange the pages of the heap; return how many bytes have huge ones. None are used under `never`."""
    if not sys.platform.startswith("linux"):
        return 0
    try:
        if "[never]" in setting.read_text():
            return 0
        parts = list(heap_of(mappings.read_text()))
    except OSError:
        return 0
    take = _madvise() if madvise is None else madvise
    pages = (page for start, end in parts for page in range(start, end, PAGE_BYTES))
    return sum(PAGE_BYTES for page in pages if take(page, PAGE_BYTES, _MADV_COLLAPSE) == 0)


def heap_of(smaps: str) -> Iterator[tuple[int, int]]:
    r"""Yield start and end of the whole huge pages in each mapping of the heap, by the text of `/proc/self/smaps`.

    >>> list(heap_of("100000-a01000 rw-p 00000000 00:00 0 \nSize:  9220 kB\nRss:  9000 kB\n"))
    [(2097152, 10485760)]
    """
    for found in _HEAP.finditer(smaps):
        line = smaps.rfind("\n", 0, found.start()) + 1
        start, end = (int(address, 16) for address in smaps[line : found.start()].split("-"))
        used = int(found[1]) * 1024
        first, last = -(-start // PAGE_BYTES) * PAGE_BYTES, end // PAGE_BYTES * PAGE_BYTES
        if used >= _DENSE * (end - start) and first < last:
            yield first, last


def _madvise() -> Advise:
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    advise: Advise = function
    return advise
