"""The version with the commit of a build: of a wheel, of a clone, and of neither."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import gorgo

COMMIT, OTHER = "0123456789abcdef0123456789abcdef01234567", "f" * 40


def clone(root: Path, head: str) -> Path:
    (root / "pyproject.toml").write_text("[project]\n")
    (root / ".git").mkdir()
    (root / ".git/HEAD").write_text(head)
    return root


def test_version_has_the_commit_of_this_build() -> None:
    assert re.fullmatch(re.escape(gorgo.__version__) + r"(\+g[0-9a-f]{10})?", gorgo.build_version())


def test_commit_of_a_clone_is_that_of_its_branch(tmp_path: Path) -> None:
    root = clone(tmp_path, "ref: refs/heads/main\n")
    (root / ".git/refs/heads").mkdir(parents=True)
    (root / ".git/refs/heads/main").write_text(f"{COMMIT}\n")
    assert gorgo.commit_of_clone(root) == COMMIT


def test_commit_of_a_clone_is_found_where_git_has_packed_its_branches(tmp_path: Path) -> None:
    root = clone(tmp_path, "ref: refs/heads/main\n")
    packed = (
        f"# pack-refs with: peeled fully-peeled sorted\n{OTHER} refs/heads/else\n{COMMIT} refs/heads/main\n^{OTHER}\n"
    )
    (root / ".git/packed-refs").write_text(packed)
    assert gorgo.commit_of_clone(root) == COMMIT


def test_commit_of_a_clone_without_a_branch_is_its_head(tmp_path: Path) -> None:
    assert gorgo.commit_of_clone(clone(tmp_path, f"{COMMIT}\n")) == COMMIT


def test_commit_is_that_of_git_in_a_clone_and_in_its_worktree(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        own = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
        try:
            done = subprocess.run(["git", *own, *words], cwd=root, capture_output=True, text=True, check=True)
        except FileNotFoundError:
            pytest.skip("git is not installed")
        return done.stdout.strip()

    root = tmp_path / "clone"
    root.mkdir()
    git("init", "--quiet")
    (root / "pyproject.toml").write_text("[project]\n")
    git("add", ".")
    git("commit", "--quiet", "--message", "first")
    git("worktree", "add", "--quiet", "-b", "beside", "../worktree")
    assert gorgo.commit_of_clone(root) == git("rev-parse", "HEAD")
    assert gorgo.commit_of_clone(tmp_path / "worktree") == git("rev-parse", "beside")


@pytest.mark.parametrize("head", ["", "ref: refs/heads/none\n", "nonsense\n", "\udcff"])
def test_clone_that_cannot_be_read_has_no_commit(tmp_path: Path, head: str) -> None:
    root = clone(tmp_path, "")
    (root / ".git/HEAD").write_bytes(head.encode("utf-8", "surrogateescape"))
    assert gorgo.commit_of_clone(root) is None


def test_environment_within_a_clone_of_another_project_has_no_commit(tmp_path: Path) -> None:
    root = clone(tmp_path, f"{COMMIT}\n")
    (root / "pyproject.toml").unlink()
    assert gorgo.commit_of_clone(root) is None
    assert gorgo.commit_of_clone(tmp_path / "none") is None
