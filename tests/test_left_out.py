"""A run says what it skipped."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests.documents import ROOT
from tests.left_out import left_out

SYSTEM = "system test: run by `make test-system`"


def test_skipped_tests_are_counted_by_the_command_that_runs_them() -> None:
    reasons = [SYSTEM, "PostgreSQL: run by `make test-postgres`", "there is no bash", SYSTEM]
    assert left_out(reasons) == (
        "SKIPPED 4: 2 run by `make test-system`; 1 run by `make test-postgres`; "
        "1 need what this machine lacks, see the reasons above"
    )


def test_a_run_that_skips_nothing_says_nothing() -> None:
    assert left_out([], ["a warning of a library"]) is None


def test_parts_that_tests_left_out_are_counted_beside_the_skipped_ones() -> None:
    warnings = ["file.py:1: UserWarning: NOT RUN: needs promtool", "a warning of a library"]
    assert left_out([], warnings) == "NOT RUN in part: 1, see the warnings above"
    line = left_out([SYSTEM], warnings)
    assert line == "SKIPPED 1: 1 run by `make test-system`; NOT RUN in part: 1, see the warnings above"


def test_the_command_that_a_skipped_test_of_postgresql_names_runs_it() -> None:
    """Marked `system` or not, wherever the server is asked for."""
    asks = re.compile(r"""getfixturevalue\("postgres"\)|\bpostgres: PostgresServer""")
    folder = ROOT / "tests/tuner"
    asking = [path for path in folder.rglob("*.py") if path.parent != folder and asks.search(path.read_text())]
    dry = ["make", "--dry-run", "--assume-old=.venv/.ready", "test-postgres"]
    command = shlex.split(subprocess.run(dry, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    assert command[command.index("-m", command.index("pytest")) + 1] == "system or not system"
    places = [ROOT / word for word in command if word.startswith("tests/")]
    assert [path for path in asking if not any(path.is_relative_to(place) for place in places)] == []
    assert all(any(path.is_relative_to(place) for path in asking) for place in places)


def test_the_line_is_the_last_before_the_counts(tmp_path: Path) -> None:
    """With the conftest.py of all tests, in a run of its own."""
    (tmp_path / "test_one.py").write_text(
        "import warnings\nimport pytest\n\n@pytest.mark.system\ndef test_one(): ...\n"
        "def test_two(): warnings.warn('NOT RUN: needs promtool')\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-ra", "-m", "", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    options = ["--rootdir", str(tmp_path), "-o", "markers=system"]
    environ = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run([*command, *options, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, env=environ)
    *_, line, counts = done.stdout.splitlines()
    assert line == "SKIPPED 1: 1 run by `make test-system`; NOT RUN in part: 1, see the warnings above"
    assert "1 skipped" in counts
    assert "NOT RUN: needs promtool" in done.stdout
