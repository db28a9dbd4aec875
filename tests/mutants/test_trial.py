"""One fault from tracing to verdict, on a small tree of its own, in real pytest processes."""

from __future__ import annotations

import fcntl
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mutants import trial
from tests.mutants.faults import Fault
from tests.mutants.reach import Records
from tests.mutants.trial import Copy, failing

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
