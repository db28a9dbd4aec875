"""Environments of programs that are compared with: made once by pip at low priority, then kept in a cache folder.

Owns the making. An environment counts only once its `.ready` file holds the recipe that made it, so an interrupted
install is made again and a new recipe replaces the old one.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gorgo.errors import GorgoError


class InstallError(GorgoError):
    """pip could not make the environment; the message ends with what it said."""


def cache_folder() -> Path:
    """Where heavy things are kept: GORGO_TEST_CACHE, else `gorgo-tests` in the user's cache folder."""
    named = os.environ.get("GORGO_TEST_CACHE")
    base = Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gorgo-tests"
    base.mkdir(parents=True, exist_ok=True)
    return base


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment of its own."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def pip(self, *arguments: str) -> None:
        command = ["nice", "-n", "19", str(self.python), "-m", "pip", "--disable-pip-version-check", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise InstallError(f"pip {' '.join(arguments)} ended with {done.returncode}: {done.stderr[-1500:]}")

    def run(self, *arguments: str) -> str:
        """Return what it prints. What it complains of is for the reader of this process."""
        return subprocess.run([str(self.python), *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout


def installed(name: str, wanted: Sequence[str], *, alone: Sequence[str] = ()) -> Environment:
    """Return the environment of that name with what is wanted, and with packages that get nothing of what they need.

    Raises `InstallError`.
    """
    with made(name, " ".join([*wanted, *alone])) as missing:
        if missing is not None and wanted:
            missing.pip("install", "-q", *wanted)
        if missing is not None and alone:
            missing.pip("install", "-q", "--no-deps", *alone)
    return Environment(cache_folder() / name)


@contextmanager
def made(name: str, recipe: str) -> Iterator[Environment | None]:
    """Yields an empty environment to fill, or None when it is there already; one process at a time."""
    folder = cache_folder() / name
    ready = folder / ".ready"
    with (cache_folder() / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if ready.is_file() and ready.read_text() == recipe:
            yield None
            return
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        yield Environment(folder)
        ready.write_text(recipe)
