"""Private copies of the tree, in each of which one pytest process at a time runs, and a thread for each."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import cache_from_source
from pathlib import Path
from queue import SimpleQueue
from typing import Literal, TypeVar

from rich.progress import Progress

from tests.mutants import plugin
from tests.mutants.faults import Fault
from tests.mutants.reach import TracedTest

# --- A private copy of the tree, in which one pytest process at a time runs; all that it starts ends with it.


Verdict = Literal["failed", "timed out", "survived", "not reached"]
#: A test process may take so long to start, and so many times what its tests took when they were traced.
START_S, SLOWER = 30.0, 5.0
#: Of pytest: all passed, and no test was found.
_NOTHING_SEEN = 0, 5
#: Also: some failed.
_RAN = 0, 1, 5
_MARK = "GORGO_MUTANTS_MARK"
_NOT_COPIED = ".git", ".venv", "runs", "dist", "__pycache__", ".*_cache", ".hypothesis"


@dataclass(frozen=True, slots=True)
class Tried:
    """What became of a fault: tests run at most, seconds, and the test that saw it."""

    verdict: Verdict
    tests: int
    seconds: float
    by: str = ""


class Copy:
    """A copy of `root` in `folder`, for one thread."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.tree = folder / "tree"
        shutil.copytree(root, self.tree, ignore=shutil.ignore_patterns(*_NOT_COPIED))
        self._scratch, self._mark = folder / "t", uuid.uuid4().hex
        self._marked = f"{_MARK}={self._mark}".encode()
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = False

    def trace(self, files: Sequence[str]) -> dict[str, dict[str, object]]:
        """What `plugin.Tracing` says of these test files; raises `RuntimeError` if pytest did not come to its end."""
        out = self.tree.parent / "trace.json"
        out.unlink(missing_ok=True)
        code, said = self._pytest(files, {plugin.TRACE: str(out)}, None)
        if code not in _RAN:
            raise RuntimeError(f"tracing {' '.join(files)} ended with {code}:\n{said[-4000:]}")
        return dict(json.loads(out.read_text()))

    def attempt(self, fault: Fault, rounds: Sequence[Sequence[TracedTest]], clock: Callable[[], float]) -> Tried:
        """Put the fault in, run the rounds until a test fails, put it right again."""
        path, began_s = self.tree / fault.path, clock()
        right = path.read_text()
        try:
            self._put(path, fault.text)
            for tests in rounds:
                code, said = self._run(tests)
                if code not in _NOTHING_SEEN:
                    count = sum(map(len, rounds))
                    return Tried("timed out" if code is None else "failed", count, clock() - began_s, failing(said))
        finally:
            self._put(path, right)
        return Tried("survived" if rounds else "not reached", sum(map(len, rounds)), clock() - began_s)

    def end(self) -> None:
        """Stop for good, from any thread."""
        self._ended = True
        self.stop()

    def stop(self) -> None:
        """End what runs, and what that started: its group, and processes that have the mark in their environment."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        for found in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if self._marked in found.read_bytes().split(b"\0"):
                    os.kill(int(found.parent.name), signal.SIGKILL)

    def _run(self, tests: Sequence[TracedTest]) -> tuple[int | None, str]:
        order = self.tree.parent / "order.json"
        order.write_text(json.dumps([test.id for test in tests]))
        files = list(dict.fromkeys(test.file for test in tests))
        limit_s = START_S + SLOWER * sum(test.seconds for test in tests)
        return self._pytest(["-x", *files], {plugin.ORDER: str(order)}, limit_s)

    def _pytest(self, words: Sequence[str], told: Mapping[str, str], limit_s: float | None) -> tuple[int | None, str]:
        if self._ended:
            raise InterruptedError
        self._scratch.mkdir()
        environ = {**os.environ, **told, "PYTHONPATH": str(self.tree), "TMPDIR": str(self._scratch), _MARK: self._mark}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", plugin.__name__, *words]
        with tempfile.TemporaryFile("w+") as out:
            self._process = process = subprocess.Popen(
                command, cwd=self.tree, env=environ, stdout=out, stderr=out, stdin=subprocess.DEVNULL, process_group=0
            )
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                self.stop()
                process.wait()
                self._process = None
                shutil.rmtree(self._scratch, ignore_errors=True)
            out.seek(0)
            return code, out.read()

    def _put(self, path: Path, text: str) -> None:
        """Write a source and forget its compiled form, which is known by size and second alone."""
        for compiled in Path(cache_from_source(str(path))).parent.glob(f"{path.stem}.*.pyc"):
            compiled.unlink()
        path.write_text(text)


def failing(said: str) -> str:
    """The first test that pytest's summary names."""
    found = re.search(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", said, re.MULTILINE)
    return found.group(1) if found else ""


# --- Some copies of the tree, a thread for each, and a bar.


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
