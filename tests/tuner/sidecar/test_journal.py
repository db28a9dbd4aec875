"""A database in trouble: nothing is lost, everything is said, and it is not asked all the time."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import event

from tests.tuner.history.examples import generation
from tuner.history import EventRow, History, database
from tuner.sidecar.journal import FIRST_RETRY_S, MAX_WAITING, Beginning, Journal

BEGINNING = Beginning(started_s=1.0, target="http://proxy", policy="gorgo", options={"seed": 1})
STOP = EventRow(at_s=2.0, kind="stop", weights=None, reason="the end")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "history.sqlite3"


@pytest.fixture
def history(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[History]:
    monkeypatch.setattr(database, "BUSY_TIMEOUT_S", 0.02)
    opened = History(f"sqlite:///{path}")
    opened.begin_campaign(now_s=1.0, target="http://proxy", policy="gorgo", options={"seed": 1})
    yield opened
    opened.close()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def journal(history: History, said: list[str]) -> Journal:
    return Journal(history, 1, BEGINNING, said.append)


def numbers(history: History) -> list[int]:
    return [row.number for row in history.generations()]


def test_a_row_and_where_the_campaign_is_after_it_are_written_together(journal: Journal, history: History) -> None:
    journal.add(generation(0))
    journal.save({"generation": 1})
    assert journal.flush(now=10.0)
    assert numbers(history) == [0]
    assert history.unfinished(target="http://proxy", policy="gorgo") == (1, {"generation": 1})


def test_an_outcome_ends_the_campaign(journal: Journal, history: History) -> None:
    journal.save({"generation": 1})
    journal.end("converged")
    assert journal.flush(now=10.0)
    (row,) = history.campaigns()
    assert (row.outcome, row.finished_s) == ("converged", 10.0)
    assert history.unfinished(target="http://proxy", policy="gorgo") is None


def test_rows_wait_for_a_locked_database_and_are_written_in_order(
    journal: Journal, history: History, path: Path, said: list[str]
) -> None:
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    for number in range(3):
        journal.add(generation(number))
        assert not journal.flush(now=10.0 + number)
    assert journal.waiting == 3
    assert len(said) == 1
    assert "another process" in said[0]
    other.execute("ROLLBACK")
    other.close()
    assert not journal.flush(now=10.5), "not asked again so soon"
    assert journal.flush(now=10.0 + FIRST_RETRY_S)
    assert numbers(history) == [0, 1, 2]
    assert said[-1] == "the history is written again"


def test_a_full_disk_keeps_the_rows_of_before_and_gets_the_others_later(
    journal: Journal, history: History, said: list[str]
) -> None:
    journal.add(generation(0))
    assert journal.flush(now=1.0)

    def small(connection: sqlite3.Connection, _entry: object) -> None:
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count={pages}")

    event.listen(history._engine, "connect", small)
    journal.add(generation(1, reason="x" * 20_000))
    assert not journal.flush(now=2.0)
    assert "disk is full" in said[0]
    assert numbers(history) == [0]
    event.remove(history._engine, "connect", small)
    assert journal.flush(now=3.0, at_once=True)
    assert numbers(history) == [0, 1]


def test_a_damaged_file_that_is_moved_away_is_replaced_by_a_new_one(
    journal: Journal, history: History, path: Path, said: list[str]
) -> None:
    journal.add(generation(0))
    assert journal.flush(now=1.0)
    for file in path.parent.glob("history.sqlite3-*"):
        file.unlink()
    path.write_bytes(b"a diary, not a database\n" * 1000)
    journal.add(generation(1))
    assert not journal.flush(now=2.0)
    assert "not a database" in said[0]
    path.rename(path.with_suffix(".damaged"))
    journal.save({"generation": 2})
    assert journal.flush(now=100.0)
    assert numbers(history) == [1]
    assert [row.target for row in history.campaigns()] == ["http://proxy"]
    assert "campaign 1 there" in said[1]


def test_what_was_never_written_is_left_over_as_json(journal: Journal, path: Path, said: list[str]) -> None:
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    journal.add(generation(4))
    journal.add(STOP)
    assert not journal.flush(now=1.0)
    other.close()
    assert [line[:12] for line in journal.left_over()] == ['{"number": 4', '{"at_s": 2.0']


def test_a_row_that_finds_no_room_is_said_whole(journal: Journal, said: list[str]) -> None:
    for number in range(MAX_WAITING + 1):
        journal.add(generation(number))
    assert journal.waiting == MAX_WAITING
    assert '"number": 0' in said[0]
    assert "is lost" in said[0]


def test_a_dry_run_writes_nothing(said: list[str]) -> None:
    journal = Journal(None, 0, BEGINNING, said.append)
    journal.add(STOP)
    journal.save({})
    journal.end("over")
    assert journal.waiting == 0
    assert journal.flush(now=1.0)
