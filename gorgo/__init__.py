"""GORGO: a router for LLM replicas in several regions. Has the version, and the commit that a build was made from."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

__version__ = "0.2.0"

#: Beside this file in a wheel: the commit that it was built from (`packaging/build_commit.py`).
COMMIT_FILE = "commit.txt"
#: Characters of a commit that are shown.
SHOWN = 10
_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")


@cache
def build_version() -> str:
    """Return the version with the commit of this build, `0.2.0+g0123456789`; without one, the version alone."""
    package = Path(__file__).parent
    commit = read_commit(package / COMMIT_FILE) or commit_of_clone(package.parent)
    return __version__ if commit is None else f"{__version__}+g{commit[:SHOWN]}"


def commit_of_clone(root: Path) -> str | None:
    """Return the commit that is checked out in a clone of this project; `None` for any other folder.

    Reads git's own files, so that no git has to be installed. An environment may lie in a clone of another project, and
    has no `pyproject.toml` beside its packages.
    """
    if not (root / "pyproject.toml").is_file():
        return None
    git = root / ".git"
    if git.is_file():  # a worktree
        found = _text(git)
        if found is None or not found.startswith("gitdir: "):
            return None
        git = root / found.removeprefix("gitdir: ")
    head = _text(git / "HEAD")
    if head is None or not head.startswith("ref: "):
        return _commit_in(head)
    name = head.removeprefix("ref: ")
    common = git / (_text(git / "commondir") or ".")
    return read_commit(git / name) or read_commit(common / name) or _packed(common, name)


def _packed(git: Path, name: str) -> str | None:
    """Return the commit of a reference that git has moved into its one file of them."""
    for line in (_text(git / "packed-refs") or "").splitlines():
        commit, _, packed = line.partition(" ")
        if packed == name:
            return _commit_in(commit)
    return None


def read_commit(path: Path) -> str | None:
    """Return the commit that a file has alone; `None` for any other content, or without the file."""
    return _commit_in(_text(path))


def _commit_in(text: str | None) -> str | None:
    return text if text is not None and _COMMIT.fullmatch(text) else None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
