"""Which lines belong together, and when what was traced is still true."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from coverage.numbits import nums_to_numbits

from tests.mutants.reach import Records, function_lines, statement_at

_SOURCE = """\
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
    found, runs_by_call = statement_at(_SOURCE, line)
    assert (list(found), runs_by_call) == (lines, local)


def test_lines_of_functions_are_those_that_a_call_runs() -> None:
    assert function_lines(_SOURCE) == [7, 8, 9, 10, 11, 12, 13]


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
