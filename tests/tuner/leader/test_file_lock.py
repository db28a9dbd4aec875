"""One tuner per proxy and history on one host."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gorgo.errors import HistoryError
from tuner.leader.file_lock import FileLock

HOLDER = """
import asyncio, sys
from pathlib import Path
from tuner.leader.file_lock import FileLock
assert asyncio.run(FileLock(Path(sys.argv[1]), ["http://a"]).try_to_lead()) is None
print("leads", flush=True)
sys.stdin.read()
"""


async def test_second_candidate_is_refused_with_the_process_that_leads(tmp_path: Path) -> None:
    first, second = (FileLock(tmp_path / "h", ["http://a"]) for _ in range(2))
    assert await first.try_to_lead() is None
    assert await second.try_to_lead() == f"process {os.getpid()} tunes http://a with this history"
    await first.release()
    assert await second.try_to_lead() is None
    await second.release()


async def test_groups_that_share_a_proxy_exclude_each_other_and_others_do_not(tmp_path: Path) -> None:
    first, overlapping, other = (
        FileLock(tmp_path / "h", urls) for urls in (["http://a", "http://b"], ["http://b", "http://c"], ["http://c"])
    )
    assert await first.try_to_lead() is None
    assert await overlapping.try_to_lead() == f"process {os.getpid()} tunes http://b with this history"
    assert await other.try_to_lead() is None, "a refused candidate locks nothing"
    await first.release()
    await other.release()


async def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "h")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "leads\n"
        lock = FileLock(tmp_path / "h", ["http://a"])
        assert await lock.try_to_lead() == f"process {holder.pid} tunes http://a with this history"
        holder.kill()
        holder.wait()
    assert await lock.try_to_lead() is None
    await lock.confirm_leadership()
    await lock.release()


async def test_a_folder_that_is_missing_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(HistoryError, match=r"nowhere/h\.[0-9a-f]{12}\.lock: No such file"):
        await FileLock(tmp_path / "nowhere" / "h", ["http://a"]).try_to_lead()


async def test_a_lock_leaves_no_file_open_for_writing(tmp_path: Path) -> None:
    """A disk with one cannot be made read-only."""
    lock = FileLock(tmp_path / "history.sqlite3", ["http://a", "http://b"])
    assert await lock.try_to_lead() is None
    modes = [fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE for file in lock._open]
    assert modes == [os.O_RDONLY] * 2
    assert [path.read_text() for path in sorted(tmp_path.glob("*.lock"))] == [f"{os.getpid()}\n"] * 2
    await lock.release()
