"""How far a piece of a test raises the memory of its process, whatever the tests before it took."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_PROCESS = Path("/proc/self")


@contextmanager
def peak_growth() -> Iterator[Callable[[], int]]:
    """Bytes of the highest resident memory since the beginning, above that of the beginning.

    Linux resets its high-water mark at the beginning. `ru_maxrss` is no such measure: it is the highest of the whole
    process, so that after one large test it does not move any more.
    """
    (_PROCESS / "clear_refs").write_text("5")
    before = _status("VmRSS")
    yield lambda: _status("VmHWM") - before


def _status(name: str) -> int:
    lines = (_PROCESS / "status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024
