"""Some copies of the tree, a thread for each, and a bar."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

from rich.progress import Progress

from tests.mutants.trial import Copy

_Item = TypeVar("_Item")
_Made = TypeVar("_Made")


class Workers:
    """Copies that are free to work, and the bar that shows it."""

    def __init__(self, copies: Sequence[Copy], progress: Progress) -> None:
        self._copies, self._progress = copies, progress
        self._free: SimpleQueue[Copy] = SimpleQueue()
        for copy in copies:
            self._free.put(copy)

    def each(
        self, what: str, items: Sequence[_Item], work: Callable[[Copy, _Item], _Made]
    ) -> Iterator[tuple[_Item, _Made]]:
        """Results as they come. What ends the loop early, as an interrupt, ends the processes first."""
        bar = self._progress.add_task(what, total=len(items))
        with ThreadPoolExecutor(len(self._copies)) as pool:
            futures = {pool.submit(self._on_a_copy, work, item): item for item in items}
            try:
                for future in as_completed(futures):
                    self._progress.advance(bar)
                    yield futures[future], future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for copy in self._copies:
                    copy.end()
                raise

    def _on_a_copy(self, work: Callable[[Copy, _Item], _Made], item: _Item) -> _Made:
        copy = self._free.get()
        try:
            return work(copy, item)
        finally:
            self._free.put(copy)


@contextmanager
def copies(root: Path, size: int) -> Iterator[list[Copy]]:
    """Private copies of a tree, removed at the end of the block."""
    with ExitStack() as stack:
        place = partial(tempfile.TemporaryDirectory, prefix="mutants-", ignore_cleanup_errors=True)
        yield [Copy(root, Path(stack.enter_context(place()))) for _ in range(size)]
