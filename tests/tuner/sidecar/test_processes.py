"""Real processes: engines, proxy and tuner, while they are killed, frozen, cut off, or have a database in trouble."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gorgo.cli import app
from tests.tuner.sidecar.relay import Relay
from tests.tuner.sidecar.rig import ENDLESS, TOKEN, Rig, Traffic, until
from tuner.history import History

#: Each starts two interpreters; a minute is enough on two cores that are free, and these are shared.
pytestmark = pytest.mark.timeout(240)


# --- Real processes: engines, proxy and tuner, under traffic, while they are killed, frozen and restarted.


@pytest.mark.system
def test_clients_notice_nothing_when_the_tuner_is_killed_and_a_second_one_goes_on(rig: Rig) -> None:
    with Traffic(rig.url) as traffic:
        first = rig.tune()
        rig.until_generation(2)
        version = rig.weights()["version"]
        assert version > 3, "weights were put"
        assert rig.end(first, signal.SIGKILL) == -signal.SIGKILL
        asked = traffic.done
        until(lambda: traffic.done > asked + 20, "traffic without a tuner")
        left = rig.numbers()
        second = rig.tune()
        rig.until_generation(left[-1] + 2)
        assert f"resumes campaign 1, generation {left[-1] + 1}" in rig.said(second)
        assert rig.end(second) == 0
    assert traffic.errors == []
    numbers = rig.numbers()
    assert numbers == list(range(len(numbers)))
    history = History(rig.database)
    assert [row.outcome for row in history.campaigns()] == [None]
    policy, best = history.weights_of("best")
    history.close()
    assert (policy, best) == ("gorgo", rig.weights()["weights"]), "the incumbent is in force when nobody watches"


@pytest.mark.system
def test_a_freeze_holds_over_a_restart_of_the_proxy_and_its_end_lets_the_tuner_go_on(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GORGO_ADMIN_TOKEN", TOKEN)
    with Traffic(rig.url):
        tuner = rig.tune()
        rig.until_generation(2)
        words = ["--url", rig.admin]
        frozen = CliRunner().invoke(
            app, ["freeze", *words, "--weights", "1", "--database", rig.database, "--reason", "held-out week"]
        )
        assert frozen.exit_code == 0, frozen.output
        until(lambda: "frozen: held-out week" in rig.said(tuner), "the tuner notices")
        pinned = rig.weights()
        generations = len(rig.numbers())
        assert rig.end("serve") == 0
        until(lambda: "routing goes on, the tuner tries again" in rig.said(tuner), "the tuner misses the proxy")
        rig.serve("serve-again")
        again = rig.weights()
        assert (again["weights"], again["frozen"]) == (pinned["weights"], pinned["frozen"])
        until(lambda: "the proxy answers again" in rig.said(tuner), "the tuner is back")
        assert len(rig.numbers()) == generations, "nothing was tried in between"
        unfrozen = CliRunner().invoke(app, ["unfreeze", *words])
        assert unfrozen.exit_code == 0, unfrozen.output
        rig.until_generation(generations + 1)
        assert rig.end(tuner) == 0
    said = rig.said(tuner)
    assert "restart: the proxy has restarted" in said
    assert "Traceback" not in said
    history = History(rig.database)
    kinds = [event.kind for event in history.events()]
    history.close()
    assert sorted(set(kinds)) == ["foreign", "freeze", "restart", "unfreeze"]
    assert rig.numbers() == list(range(len(rig.numbers())))


# --- Real processes in trouble: the network to the proxy is cut, the database is locked, full, damaged or read-only.
#
# In each case clients notice nothing, the tuner says what is wrong, goes on, and loses no row.


#: Room for the tuner's log, a few lines, and none for a transaction of the history: six pages.
LOG_BYTES = 8_192


def assert_no_row_is_missing(rig: Rig, *, more_than: list[int]) -> None:
    numbers = rig.numbers()
    assert numbers == list(range(len(numbers)))
    assert len(numbers) > len(more_than)


@pytest.mark.system
@pytest.mark.parametrize("how", ["refused", "silent"])
def test_a_tuner_cut_off_in_mid_generation_goes_on_where_it_was(rig: Rig, how: str) -> None:
    with Relay(int(rig.admin.rpartition(":")[2])) as relay, Traffic(rig.url) as traffic:
        tuner = rig.tune(*ENDLESS, url=relay.url)
        rig.until_generation(1)
        rig.until_weights_move()
        if how == "refused":
            relay.cut()
        else:
            relay.silence()
        rig.until_said(tuner, "routing goes on, the tuner tries again")
        left, asked = rig.weights()["version"], traffic.done
        until(lambda: traffic.done > asked + 20, "traffic goes on")
        before = rig.numbers()
        assert rig.weights()["version"] == left, "what was under test stays in force while nobody can change it"
        relay.mend()
        rig.until_said(tuner, "the proxy answers again")
        rig.until_generation(before[-1] + 2)
        assert rig.end(tuner) == 0
    assert traffic.errors == []
    assert_no_row_is_missing(rig, more_than=before)
    said = rig.said(tuner)
    assert said.count("routing goes on, the tuner tries again") == 1
    assert "samples are missing" not in said, "the proxy has kept them"
    assert "restart" not in said
    assert "Traceback" not in said


@pytest.mark.system
def test_a_locked_database_stops_neither_traffic_nor_tuner_and_loses_no_row(rig: Rig) -> None:
    with Traffic(rig.url) as traffic:
        tuner = rig.tune(*ENDLESS)
        rig.until_generation(1)
        other = sqlite3.connect(rig.file, isolation_level=None, timeout=10)
        other.execute("BEGIN IMMEDIATE")
        before = rig.numbers()
        rig.until_said(tuner, "another process writes to it")
        rig.until_weights_move()
        assert rig.numbers() == before, "rows of before are there"
        other.execute("ROLLBACK")
        other.close()
        assert rig.end(tuner) == 0
    assert traffic.errors == []
    numbers = rig.numbers()
    assert numbers == list(range(len(numbers)))
    assert len(numbers) >= len(before) + 2
    assert rig.said(tuner).count("another process writes to it") == 1


@pytest.mark.system
def test_files_that_must_not_grow_and_a_damaged_one_stop_neither_traffic_nor_tuner(rig: Rig) -> None:
    with Traffic(rig.url) as traffic:
        tuner = rig.tune(*ENDLESS)
        rig.until_generation(1)
        limits = resource.prlimit(rig.pid(tuner), resource.RLIMIT_FSIZE)
        before = rig.numbers()
        resource.prlimit(rig.pid(tuner), resource.RLIMIT_FSIZE, (LOG_BYTES, limits[1]))
        rig.until_said(tuner, "a limit on file sizes refuses it; what was written before is safe")
        rig.until_weights_move()
        assert rig.numbers()[: len(before)] == before, "rows of before are there"
        resource.prlimit(rig.pid(tuner), resource.RLIMIT_FSIZE, limits)
        rig.until_said(tuner, "the history is written again")

        whole = rig.file.read_bytes()
        rig.file.write_bytes(whole[:100] + b"\xff" * 3996 + whole[4096:])
        rig.until_said(tuner, "move it away")
        rig.until_weights_move()
        assert rig.file.read_bytes()[100:4096] == b"\xff" * 3996, "nothing is written over it"
        rig.file.write_bytes(whole)
        rig.until_said(tuner, "the history is written again", times=2)
        assert rig.end(tuner) == 0
    assert traffic.errors == []
    assert_no_row_is_missing(rig, more_than=before)
    assert "Traceback" not in rig.said(tuner)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB of its own, for the tuner's history."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("needs root and mount")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "gorgo-test", str(disk)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.system
def test_a_full_and_then_a_read_only_disk_stop_neither_traffic_nor_tuner(rig: Rig, small_disk: Path) -> None:
    rig.keep_history_in(small_disk)
    with Traffic(rig.url) as traffic:
        tuner = rig.tune(*ENDLESS)
        rig.until_generation(1)
        before = rig.numbers()
        fill = small_disk / "somebody-s-log"
        until(lambda: _fill(fill), "the disk is full")
        rig.until_said(tuner, "the disk is full; what was written before is safe")
        rig.until_weights_move()
        fill.unlink()
        rig.until_said(tuner, "the history is written again")
        assert rig.numbers()[: len(before)] == before

        _remount(small_disk, "ro")
        rig.until_said(tuner, "the file or its folder is read-only")
        rig.until_weights_move()
        _remount(small_disk, "rw")
        rig.until_said(tuner, "the history is written again", times=2)
        assert rig.end(tuner) == 0
    assert traffic.errors == []
    assert_no_row_is_missing(rig, more_than=before)
    assert "Traceback" not in rig.said(tuner)


def _fill(path: Path) -> bool:
    """Whether the disk is full now."""
    try:
        with path.open("ab", buffering=0) as file:
            while file.write(b"x" * 4096) == 4096:
                pass
    except OSError:
        return True
    return False


def _remount(disk: Path, how: str) -> None:
    """A moment in which no file is open for writing has to be met."""

    def done() -> bool:
        return subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], capture_output=True).returncode == 0

    until(done, f"remounted {how}")
