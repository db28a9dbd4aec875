"""One fault from tracing to verdict in real pytest processes, which lines belong together, and work on copies."""

from __future__ import annotations

import fcntl
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from coverage.numbits import nums_to_numbits
from rich.progress import Progress

from tests.mutants import trial
from tests.mutants.faults import Fault
from tests.mutants.reach import Records, function_lines, statement_at
from tests.mutants.trial import Copy, Workers, failing

# --- One fault from tracing to verdict, on a small tree of its own, in real pytest processes.


_SOURCE = "def double(n):\n    return 2 * n\n\n\ndef unused(n):\n    return n\n"
_TESTS = """\
import os
import subprocess
import sys
from pathlib import Path

from gorgo.a import double

def test_double():
    assert double(3) == 6

def test_skips():
    import pytest
    pytest.skip("not here")

def test_leaves_a_process_behind():
    code = "import fcntl, os, time; fcntl.flock(1, fcntl.LOCK_EX); os.write(2, b'locked'); time.sleep(600)"
    with Path(os.environ["TMPDIR"], "../lock").open("w") as lock:
        child = subprocess.Popen(
            [sys.executable, "-c", code], stdout=lock, stderr=subprocess.PIPE, start_new_session=True
        )
    assert child.stderr.read(6) == b"locked"
    child.returncode = double(0)  # so that Popen does not complain
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Copy]:
    root = tmp_path_factory.mktemp("root")
    files = {
        "gorgo/__init__.py": "",
        "gorgo/a.py": _SOURCE,
        "tuner/__init__.py": "",
        "tests/test_a.py": _TESTS,
        "pyproject.toml": "[tool.pytest.ini_options]",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    shutil.copytree(Path(__file__).parent, root / "tests/mutants")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # none is needed here, and each takes its time
        yield Copy(root, tmp_path_factory.mktemp("copy"))


@pytest.fixture(scope="module")
def records(copy: Copy) -> Records:
    records = Records(copy.tree, copy.tree.parent / "kept")
    records.write(records.files, copy.trace(records.files))
    return records


def fault(text: str) -> Fault:
    return Fault("gorgo/a.py", 2, "number", "", "", text, "")


def test_a_trace_says_which_test_runs_which_line_and_which_shows_nothing(records: Records) -> None:
    by_name = {test.id.split("::")[1]: test for test in records.tests()}
    assert set(by_name) == {"test_double", "test_leaves_a_process_behind"}
    assert by_name["test_double"].runs("gorgo/a.py", [2])
    assert not by_name["test_double"].runs("gorgo/a.py", [6])
    assert records.without_verdict() == 1


@pytest.mark.system
def test_a_fault_dies_by_the_test_that_fails_and_the_source_is_put_right(copy: Copy, records: Records) -> None:
    test = next(test for test in records.tests() if "double" in test.id)
    tried = copy.attempt(fault(_SOURCE.replace("2 *", "3 *")), [[test]], time.monotonic)
    assert (tried.verdict, tried.tests, tried.by) == ("failed", 1, "tests/test_a.py::test_double")
    assert (copy.tree / "gorgo/a.py").read_text() == _SOURCE
    # Of the same size and second as the one before, so that nothing but its text tells it from the compiled fault.
    assert copy.attempt(fault(_SOURCE), [[test]], time.monotonic).verdict == "survived"


def test_what_a_test_leaves_behind_is_ended(copy: Copy, records: Records) -> None:
    test = next(test for test in records.tests() if "behind" in test.id)
    assert copy.attempt(fault(_SOURCE), [[test]], time.monotonic).verdict == "survived"
    with (copy.tree.parent / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # waits for as long as the process lives


def test_tests_that_do_not_end_in_time_have_seen_the_fault(
    copy: Copy, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "START_S", 0.01)  # not even Python starts
    monkeypatch.setattr(trial, "SLOWER", 0.0)
    assert copy.attempt(fault(_SOURCE), [records.tests()], time.monotonic).verdict == "timed out"


def test_a_fault_that_no_test_reaches_is_not_tried(copy: Copy) -> None:
    assert copy.attempt(fault(_SOURCE), [], time.monotonic).verdict == "not reached"


@pytest.mark.parametrize(
    ("said", "test"),
    [
        ("..F\nFAILED tests/a.py::b[1 - 2] - assert 1 == 2\nFAILED tests/a.py::c", "tests/a.py::b[1"),
        ("ERROR tests/a.py - ImportError: no b", "tests/a.py"),
        ("ERROR   a:b.py:7 broken\nFAILED tests/a.py::b - assert 0", "tests/a.py::b"),
        ("3 passed", ""),
    ],
)
def test_the_test_that_saw_it_is_in_the_summary(said: str, test: str) -> None:
    assert failing(said) == test


# --- Which lines belong together, and when what was traced is still true.


_SOURCE_REACH = """\
LIMIT = f(
    1,
)

@cached
def f(a, b=2):
    if (
        a
    ):
        return g(
            a
        )
    return b


class A:
    c: int = 1
"""


@pytest.mark.parametrize(
    ("line", "lines", "local"),
    [
        (2, [1, 2, 3], False),
        (6, [6], False),
        (8, [7, 8, 9], True),
        (11, [10, 11, 12], True),
        (13, [13], True),
        (17, [17], False),
    ],
)
def test_a_line_stands_for_its_statement_or_the_head_of_its_block(line: int, lines: list[int], local: bool) -> None:
    found, runs_by_call = statement_at(_SOURCE_REACH, line)
    assert (list(found), runs_by_call) == (lines, local)


def test_lines_of_functions_are_those_that_a_call_runs() -> None:
    assert function_lines(_SOURCE_REACH) == [7, 8, 9, 10, 11, 12, 13]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("gorgo/a.py", "tuner/b.py", "tests/core/test_a.py", "tests/core/test_b.py", "tests/core/helper.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def record(root: Path) -> Records:
    """Records of two test files: one test passes, one fails, and a fixture of the module runs line 5."""
    records = Records(root, root / "kept")
    bits = nums_to_numbits([3]).hex()
    traced: dict[str, dict[str, Any]] = {
        "tests": {"tests/core/test_a.py::good": (0.5, True), "tests/core/test_b.py::bad": (0.1, False)},
        "lines": {
            "tests/core/test_a.py::good": {"gorgo/a.py": bits},
            "tests/core/test_a.py": {"gorgo/a.py": nums_to_numbits([5]).hex()},
            "tests/core/test_b.py::bad": {"gorgo/a.py": bits},
        },
    }
    records.write(records.files, traced)
    return records


def test_a_test_that_fails_on_the_unchanged_tree_shows_nothing(root: Path) -> None:
    records = record(root)
    assert [test.id for test in records.tests()] == ["tests/core/test_a.py::good"]
    assert records.without_verdict() == 1


def test_a_test_runs_its_own_lines_and_those_of_what_its_file_shares(root: Path) -> None:
    (test,) = record(root).tests()
    assert [line for line in range(8) if test.runs("gorgo/a.py", [line])] == [3, 5]
    assert not test.runs("gorgo/b.py", [3])


@pytest.mark.parametrize(
    ("changed", "stale"),
    [
        ("tests/core/test_b.py", ["tests/core/test_b.py"]),
        ("gorgo/a.py", ["tests/core/test_a.py", "tests/core/test_b.py"]),
        ("tests/core/helper.py", ["tests/core/test_a.py", "tests/core/test_b.py"]),
        ("README.md", []),
    ],
)
def test_what_was_traced_is_true_until_something_under_it_changes(root: Path, changed: str, stale: list[str]) -> None:
    before = record(root)
    assert before.stale() == []
    (root / changed).write_text("a = 1")
    after = Records(root, root / "kept")
    assert after.stale() == stale
    assert (after.tree == before.tree) is (not stale)


# --- Work on copies: each has one item at a time, and an interrupt ends what runs before it goes on.


class _Copy(Copy):
    """A copy of nothing, whose work lasts until it is ended."""

    def __init__(self) -> None:
        self.ended = Event()

    def end(self) -> None:
        self.ended.set()


def test_every_item_is_worked_on() -> None:
    workers = Workers([_Copy(), _Copy()], Progress(disable=True))
    found = workers.each("squares", [1, 2, 3, 4], lambda _, item: item**2)
    assert sorted(found) == [(1, 1), (2, 4), (3, 9), (4, 16)]


def test_an_interrupt_ends_what_runs_and_begins_nothing_more() -> None:
    copies, begun = [_Copy(), _Copy()], []

    def work(copy: Copy, item: str) -> bool:
        assert isinstance(copy, _Copy)
        begun.append(item)
        return item == "short" or copy.ended.wait(60)

    def interrupted() -> None:
        for item, _ in Workers(copies, Progress(disable=True)).each("work", ["short", "a", "b", "c", "d"], work):
            assert item == "short"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert all(copy.ended.is_set() for copy in copies)
    assert set(begun) <= {"short", "a", "b"}
