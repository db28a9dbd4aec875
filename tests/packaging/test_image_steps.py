"""The Containerfile without a container engine: its builder's steps in a folder, and what they make, run confined.

Linux, root and the package index are needed. The process gets what the image and compose give it: a read-only root, a
uid of its own without capabilities, one folder to write, and number 1 in a process namespace.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.packaging.conftest import ROOT
from tests.packaging.containerfile import stages

pytestmark = pytest.mark.system

BUILDER, IMAGE = stages((ROOT / "packaging/Containerfile").read_text())
TOKEN = "token-of-the-tests"
START_S = 60.0

#: A mount namespace in which only `state` can be written; a Python below a home that is root's alone is shown to all.
CONFINED = """
set -eu
mount --make-rprivate /
if [ -n "$HIDDEN" ]; then
  mount --bind "$PYTHON" "$SCRATCH"
  mount -t tmpfs -o mode=0755 none "$HIDDEN"
  mkdir -p "$PYTHON"
  mount --bind "$SCRATCH" "$PYTHON"
  mount -o remount,ro,bind "$PYTHON"
  mount -o remount,ro "$HIDDEN"
fi
mount --bind "$STATE" "$STATE"
mount -o remount,ro,bind /
exec setpriv --reuid 10001 --regid 10001 --clear-groups --bounding-set=-all --no-new-privs "$@"
"""


@pytest.fixture(scope="module")
def root_of_image() -> Iterator[Path]:
    """A folder with `opt/gorgo` as the builder leaves it, and `state`; other users may enter it."""
    if os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("setpriv"):
        pytest.skip("IMAGE STEPS SKIPPED: need root, unshare and setpriv")
    folder = Path(tempfile.mkdtemp(prefix="gorgo-image-", dir="/var/tmp"))
    try:
        folder.chmod(0o755)
        (folder / "scratch").mkdir()
        (folder / "state").mkdir(mode=0o700)
        os.chown(folder / "state", 10001, 10001)
        build(folder)
        yield folder
    finally:
        shutil.rmtree(folder)


def build(folder: Path) -> None:
    """COPY and RUN of the builder, `/opt` and the working folder being below `folder`."""
    work = folder / "build"
    work.mkdir()
    (folder / "bin").mkdir()
    (folder / "bin/python").symlink_to(Path(sys.base_prefix) / "bin/python3")
    (folder / "opt").mkdir()
    given = dict(step.words[0].split("=", 1) for step in BUILDER if step.word == "ARG")
    for step in BUILDER:
        if step.word == "COPY":
            copy(step.words[:-1], work / step.words[-1])
        if step.word == "RUN":
            text = step.rest.replace("/opt/gorgo", f"{folder}/opt/gorgo")
            environ = os.environ | given | {"PATH": f"{folder}/bin:/usr/bin:/bin"}
            done = subprocess.run(
                ["sh", "-c", text], cwd=work, env=environ, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stdout + done.stderr
    shutil.copy(ROOT / "packaging/healthcheck.py", folder / "opt/gorgo")


def copy(sources: list[str], target: Path) -> None:
    for source in sources:
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            target.mkdir(exist_ok=True)
            shutil.copy(ROOT / source, target)


def hidden(folder: Path) -> str:
    """The outermost folder on the way there that others may not enter, or nothing."""
    return next((str(one) for one in [*reversed(folder.parents), folder] if not one.stat().st_mode & 0o001), "")


def confined(folder: Path, *words: str) -> list[str]:
    return ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", CONFINED, "sh", *words]


def environ(folder: Path) -> dict[str, str]:
    shown = {
        "HIDDEN": hidden(Path(sys.base_prefix)),
        "PYTHON": sys.base_prefix,
        "SCRATCH": str(folder / "scratch"),
        "STATE": str(folder / "state"),
    }
    path = f"{folder}/opt/gorgo/bin:/usr/bin:/bin:/usr/sbin:/sbin"
    return shown | {"PATH": path, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1", "GORGO_ADMIN_TOKEN": TOKEN}


def test_the_image_has_what_it_runs_with_and_no_tools(root_of_image: Path) -> None:
    programs = {path.name for path in (root_of_image / "opt/gorgo/bin").iterdir()}
    assert {"gorgo", "python"} <= programs
    assert not {"pip", "pytest", "ruff", "hatchling"} & programs
    done = subprocess.run(
        [root_of_image / "opt/gorgo/bin/gorgo", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("gorgo ")


def test_a_proxy_runs_as_nobody_on_a_read_only_root_and_stops_as_process_one(root_of_image: Path) -> None:
    folder, state = root_of_image, root_of_image / "state"
    (command,) = [step.words for step in IMAGE if step.word == "CMD"]
    words = [word.replace("/var/lib/gorgo", str(state)) for word in command]
    last = ["--bind", "127.0.0.1:0", "--admin-bind", "127.0.0.1:0", "--request-log", str(state / "requests.jsonl")]
    environment = environ(folder) | {"GORGO_CONFIG": str(folder / "regions.yaml")}
    shutil.copy(ROOT / "regions.yaml", folder)
    with (folder / "said").open("w+") as said:
        unshare = subprocess.Popen(
            confined(folder, "gorgo", *words, *last), env=environment, cwd=state, stdout=said, stderr=subprocess.STDOUT
        )
        try:
            ready = awaited(folder / "said", r"listening on (http://\S+) \(admin (http://[^)\s]+)\)", unshare)
            (inside,) = Path(f"/proc/{unshare.pid}/task/{unshare.pid}/children").read_text().split()
            status = Path(f"/proc/{inside}/status").read_text()
            assert re.search(r"^Uid:\s+10001\s+10001\s+10001\s+10001$", status, re.MULTILINE)
            assert re.search(r"^CapEff:\s+0+$", status, re.MULTILINE)
            assert re.search(r"^NSpid:\s+\d+\s+1$", status, re.MULTILINE)
            check = [folder / "opt/gorgo/bin/python", folder / "opt/gorgo/healthcheck.py"]
            subprocess.run([*check, f"{ready[1]}/health"], check=True)
            os.kill(int(inside), signal.SIGTERM)
            assert unshare.wait(START_S) == 0, (folder / "said").read_text()
        finally:
            unshare.kill()
            unshare.wait()
    assert (state / "state.json").is_file()
    assert "Traceback" not in (folder / "said").read_text()


def test_what_is_run_there_can_write_nothing_else(root_of_image: Path) -> None:
    script = f"touch {root_of_image}/opt/gorgo/x || touch /var/tmp/x || touch /tmp/x || echo refused"
    done = subprocess.run(
        confined(root_of_image, "sh", "-c", script),
        env=environ(root_of_image),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "refused\n"


def awaited(path: Path, pattern: str, process: subprocess.Popen[bytes]) -> re.Match[str]:
    """The first match in what a process says there."""
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s and process.poll() is None:
        if found := re.search(pattern, path.read_text()):
            return found
        time.sleep(0.05)
    raise AssertionError(path.read_text())
