"""packaging/compiled.py: which modules it compiles, and that a compiled wheel simulates as the sources do."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gorgo import __version__
from tests.packaging.conftest import ROOT

COMPILED = runpy.run_path(str(ROOT / "packaging/compiled.py"))
#: One policy with every part of the cost, and one that draws.
RUN = [
    "simulate",
    "chat-small",
    "--policy",
    "gorgo-ms",
    "--policy",
    "random",
    "--seeds",
    "2",
    "--limit",
    "150",
    "--json",
]


def test_every_pattern_names_modules_and_every_exclusion_is_of_one() -> None:
    for pattern in COMPILED["COMPILED"]:
        assert list(ROOT.glob(pattern)), pattern
    matched = {str(path.relative_to(ROOT)) for pattern in COMPILED["COMPILED"] for path in ROOT.glob(pattern)}
    assert COMPILED["EXCLUDED"].keys() <= matched


def test_no_compiled_module_has_what_mypyc_refuses() -> None:
    """A protocol for isinstance, and structs that msgspec reads by their annotations."""
    for path in COMPILED["modules"]():
        source = (ROOT / path).read_text()
        assert "@runtime_checkable" not in source, path
        assert "msgspec.Struct" not in source, path


@pytest.mark.system
@pytest.mark.timeout(1800)
def test_compiled_wheel_simulates_the_same_rows_to_the_last_digit(tmp_path: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("COMPILED WHEEL SKIPPED: no C compiler (Debian: apt install gcc)")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")]
    subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"HATCH_BUILD_HOOKS_ENABLE": "1"})
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert not wheel.name.endswith("-none-any.whl")
    installed = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--target", str(installed), str(wheel)]
    subprocess.run(pip, check=True)
    assert _gorgo(installed, "--version") == f"gorgo {__version__}, compiled\n"
    assert json.loads(_gorgo(installed, *RUN)) == json.loads(_gorgo(ROOT, *RUN))


def _gorgo(sources: Path, *words: str) -> str:
    environ = os.environ | {"PYTHONPATH": str(sources)}
    command = [sys.executable, "-P", "-m", "gorgo", *words]
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True).stdout
