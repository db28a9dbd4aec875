"""Each first-hour guide, typed from its first line to its last: a fresh clone, an empty folder, a clean environment.

Needs the package index for the installs, and minutes; steps that name a program are left out, loudly, where it is not.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import warnings
from pathlib import Path

import pytest

from tests.packaging.conftest import GUIDES, ROOT
from tests.packaging.guide import run, steps

pytestmark = [pytest.mark.system, pytest.mark.filterwarnings("default::UserWarning")]

#: The longest runs a campaign of two generations on an hour's traffic, on two cores that may be busy.
TIMEOUT_S = 1500


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What git knows of this tree, and nothing else."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("GUIDES NOT RUN: needs git, and a clone")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    folder = tmp_path / "gorgo"
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def environment() -> dict[str, str]:
    """A newcomer's: nothing of this one's, no colours, an empty configuration of terraform."""
    kept = {name: os.environ[name] for name in ("HOME", "PATH", "LANG", "TMPDIR") if name in os.environ}
    path = os.pathsep.join(part for part in kept["PATH"].split(os.pathsep) if "/.venv/" not in f"{part}/")
    return kept | {"PATH": path, "TF_CLI_CONFIG_FILE": os.devnull, "CHECKPOINT_DISABLE": "1", "TERM": "dumb"}


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_a_guide_prints_what_it_says(guide: Path, clone: Path, tmp_path: Path) -> None:
    todo = steps(guide.read_text())
    left_out = [step for step in todo if step.missing()]
    for step in left_out:
        warnings.warn(f"{guide.name}, line {step.line} NOT RUN: needs {', '.join(step.missing())}", stacklevel=1)
    (tmp_path / "records").mkdir()
    done = run(
        [step for step in todo if step not in left_out],
        clone=clone,
        records=tmp_path / "records",
        environ=environment(),
        timeout_s=TIMEOUT_S,
    )
    assert [fault for one in done if (fault := one.fault())] == []
