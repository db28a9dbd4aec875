"""The heap's own pages alone are exchanged, and only where the machine's operator permits huge pages."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from gorgo.live.huge_pages import FIRST_S, LONGEST_S, PAGE_BYTES, collapse_heap, heap_of, use_huge_pages

HEAP = "00400000-00c00000 rw-p 00000000 00:00 0                          [heap]"
DENSE = "Rss:                8000 kB"


@pytest.mark.parametrize(
    "first_line",
    [
        "00400000-00c00000 r-xp 00000000 fe:00 71 /usr/lib/libpython3.11.so",
        "00400000-00c00000 rw-p 00001000 fe:00 71 /usr/lib/libpython3.11.so",
        "00400000-00c00000 rw-s 00000000 00:01 9 /dev/shm/x",
        "00400000-00c00000 r--p 00000000 00:00 0",
        "00400000-00c00000 rw-p 00000000 00:00 0 [stack]",
        "00401000-00600000 rw-p 00000000 00:00 0",
    ],
)
def test_what_is_not_heap_or_too_small_stays(first_line: str) -> None:
    assert list(heap_of(f"{first_line}\nSize: 8192 kB\n{DENSE}\n")) == []


def test_memory_that_is_mostly_unused_is_not_filled() -> None:
    assert list(heap_of(f"{HEAP}\nRss:                 500 kB\n")) == []
    assert list(heap_of(f"{HEAP}\n{DENSE}\n")) == [(0x400000, 0xC00000)]


def test_each_mapping_has_the_use_that_stands_below_it() -> None:
    other = "00e00000-01600000 rw-p 00000000 00:00 0 \nSize: 8192 kB\nRss: 500 kB\nVmFlags: rd wr mr\n"
    assert list(heap_of(f"{other}{HEAP}\nSize: 8192 kB\n{DENSE}\n")) == [(0x400000, 0xC00000)]
    assert list(heap_of(f"{HEAP}\n{other}")) == []


@pytest.mark.parametrize(("setting", "pages"), [("always [madvise] never", 3), ("always madvise [never]", 0)])
def test_each_page_is_exchanged_once_unless_the_operator_forbids_it(tmp_path: Path, setting: str, pages: int) -> None:
    mappings, enabled = tmp_path / "smaps", tmp_path / "enabled"
    mappings.write_text(f"{HEAP}\nSize: 8192 kB\n{DENSE}\n00c00000-00c01000 ---p 00000000 00:00 0\nRss: 0 kB\n")
    enabled.write_text(setting)
    asked: list[int] = []

    def madvise(start: int, length: int, advice: int) -> int:
        assert (length, advice) == (PAGE_BYTES, 25)
        asked.append(start)
        return -1 if start == 0x800000 else 0

    assert collapse_heap(mappings, enabled, madvise) == pages * PAGE_BYTES
    assert asked == ([0x400000, 0x600000, 0x800000, 0xA00000] if pages else [])
    assert collapse_heap(tmp_path / "none", enabled, madvise) == 0


async def test_the_first_exchange_waits_until_the_process_has_settled_and_each_next_one_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str | float] = []

    async def sleep(delay_s: float) -> None:
        if len(calls) == 18:
            raise asyncio.CancelledError
        calls.append(delay_s)

    monkeypatch.setattr("gorgo.live.huge_pages.asyncio.sleep", sleep)
    monkeypatch.setattr("gorgo.live.huge_pages.collapse_heap", lambda: calls.append("exchanged"))
    with pytest.raises(asyncio.CancelledError):
        await use_huge_pages()
    assert calls[:4] == [FIRST_S, "exchanged", 2 * FIRST_S, "exchanged"]
    assert calls[-2:] == [LONGEST_S, "exchanged"]


def test_objects_are_the_same_after_the_exchange() -> None:
    """In a process of its own: the heap is all of it."""
    program = (
        "from gorgo.live.huge_pages import collapse_heap; heap = [b'%d' % n * 20 for n in range(60_000)]; "
        "found = collapse_heap(); print(found >= 0, heap == [b'%d' % n * 20 for n in range(60_000)])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True True"
