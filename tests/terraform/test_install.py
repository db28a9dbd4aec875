"""The router's install script, run for real: the wheel and the lock file, from a store that is a folder."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.terraform.workspace import ROOT

pytestmark = pytest.mark.system


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*command, "-w", str(tmp_path), str(ROOT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return next(tmp_path.glob("gorgo_router-*.whl"))


def installer(rendered: dict[str, Any], wheel: Path, folder: Path) -> Path:
    """The script with this wheel's hashes in place of the made-up ones, and folders below `folder`."""
    (text,) = [
        one["content"]
        for one in yaml.safe_load(rendered["core"]["router"]["user_data"])["write_files"]
        if one["path"] == "/usr/local/sbin/gorgo-install"
    ]
    for made_up, path in ((b"wheel", wheel), (b"lock", ROOT / "requirements.lock")):
        text = text.replace(hashlib.sha256(made_up).hexdigest(), hashlib.sha256(path.read_bytes()).hexdigest())
    text = text.replace("gorgo_router-0.2.0-py3-none-any.whl", wheel.name).replace("/opt/gorgo", str(folder / "opt"))
    (folder / "gorgo-install").write_text(text)
    (folder / "store").mkdir()
    shutil.copy(wheel, folder / "store")
    shutil.copy(ROOT / "requirements.lock", folder / "store")
    (folder / "bin").mkdir()
    (folder / "bin/aws").write_text(f'#!/bin/bash\ncp "{folder}/store/${{4##*/}}" "$5"\n')
    (folder / "bin/aws").chmod(0o755)
    (folder / "bin/dnf").write_text("#!/bin/bash\n[[ $* == 'install --assumeyes --quiet nginx python3.11' ]]\n")
    (folder / "bin/dnf").chmod(0o755)
    (folder / "bin/python3.11").symlink_to(sys.executable)
    return folder / "gorgo-install"


def run(script: Path) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"PATH": f"{script.parent / 'bin'}:{os.environ['PATH']}"}
    return subprocess.run(
        ["nice", "-n", "19", "bash", str(script)], env=environ, capture_output=True, text=True, check=False
    )


def test_the_wheel_runs_with_what_the_lock_file_says_and_without_the_developers_tools(
    rendered: dict[str, Any], wheel: Path, tmp_path: Path
) -> None:
    script = installer(rendered, wheel, tmp_path)
    done = run(script)
    assert done.returncode == 0, done.stderr
    programs = tmp_path / "opt/venv/bin"
    version = subprocess.run([programs / "gorgo", "--version"], capture_output=True, text=True, check=True).stdout
    assert wheel.name.split("-")[1] in version
    listed = subprocess.run(
        [programs / "python", "-m", "pip", "list", "--format=freeze"], capture_output=True, text=True, check=True
    ).stdout
    locked = (ROOT / "requirements.lock").read_text()
    installed = [
        line for line in listed.lower().splitlines() if line.split("==")[0] not in ("gorgo-router", "pip", "setuptools")
    ]
    assert len(installed) > 10
    assert [line for line in installed if line.replace("_", "-") not in locked.lower().replace("_", "-")] == []
    assert not {"pytest", "mypy", "ruff"} & {line.split("==")[0] for line in installed}
    assert run(script).returncode == 0, "once more changes nothing"


def test_a_wheel_that_was_changed_on_the_way_is_not_installed(
    rendered: dict[str, Any], wheel: Path, tmp_path: Path
) -> None:
    script = installer(rendered, wheel, tmp_path)
    with (tmp_path / "store" / wheel.name).open("ab") as file:
        file.write(b"more")
    done = run(script)
    assert done.returncode != 0
    assert "FAILED" in done.stdout + done.stderr
    assert not (tmp_path / "opt/venv").exists()
