"""Files that are written whole or not at all, and what is no file."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from gorgo.config.atomic import PUBLIC, create_file, write_atomically


def test_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path) -> None:
    # A rename over /dev/null, which root may do, would take it from every program of the machine.
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_atomically(pipe, b"weights")
        assert os.read(reader, 100) == b"weights"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_folder_is_no_file_to_write(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        write_atomically(tmp_path, b"weights")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("mode", "others"), [(None, 0), (PUBLIC, 0o044)])
def test_file_is_for_its_owner_unless_it_is_for_everybody(tmp_path: Path, mode: int | None, others: int) -> None:
    before = os.umask(0o022)
    try:
        write_atomically(tmp_path / "file", b"x", **({} if mode is None else {"mode": mode}))
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o077 == others


@pytest.mark.parametrize("name", [".file.new", "file"])
def test_a_link_that_another_user_has_planted_is_never_written_through(tmp_path: Path, name: str) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"old")
    (tmp_path / name).symlink_to(victim)
    if name == "file":
        create_file(tmp_path / "file").close()
    else:
        write_atomically(tmp_path / "file", b"new")
    assert victim.read_bytes() == b"old"
    assert not (tmp_path / "file").is_symlink()


def test_a_file_that_another_user_has_planted_is_replaced_and_not_filled(tmp_path: Path) -> None:
    theirs = (tmp_path / ".file.new").open("wb")
    write_atomically(tmp_path / "file", b"secret")
    with theirs:
        assert os.fstat(theirs.fileno()).st_size == 0
    assert (tmp_path / "file").read_bytes() == b"secret"
