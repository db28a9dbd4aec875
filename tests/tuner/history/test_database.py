"""How a database is opened, and what its transactions lock."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import NullPool

from gorgo.errors import HistoryError
from tuner.history import History, database
from tuner.history.database import open_engine, reading, writing


def test_every_connection_to_sqlite_is_safe_against_a_power_cut_and_waits_five_seconds(tmp_path: Path) -> None:
    engine = open_engine(f"sqlite:///{tmp_path}/h.sqlite3")
    with reading(engine) as connection:
        found = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        }
    assert found == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": 5000}


@pytest.mark.parametrize(("transaction", "locks"), [(writing, True), (reading, False)])
def test_the_write_lock_is_taken_at_the_start_of_a_write_and_by_no_read(
    transaction: Any, locks: bool, tmp_path: Path
) -> None:
    path = tmp_path / "h.sqlite3"
    engine = open_engine(f"sqlite:///{path}")
    with writing(engine):
        pass  # the file is there now, with its write-ahead log
    with closing(sqlite3.connect(path, timeout=0.0, isolation_level=None)) as other, transaction(engine):
        if locks:
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                other.execute("BEGIN IMMEDIATE")
        else:
            other.execute("BEGIN IMMEDIATE")
            other.execute("ROLLBACK")


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    History(f"sqlite:///{tmp_path}/h.sqlite3").close()
    engine = open_engine(f"sqlite:///{tmp_path}/h.sqlite3")

    def write() -> None:
        with writing(engine) as connection:
            connection.exec_driver_sql("INSERT INTO event (at_s, kind, reason) VALUES (1, 'freeze', 'r')")
            connection.exec_driver_sql("INSERT INTO nowhere VALUES (1)")

    with pytest.raises(HistoryError, match="no such table"):
        write()
    with reading(engine) as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM event").scalar() == 0


@pytest.mark.parametrize(
    ("url", "driver"),
    [
        ("postgresql://gorgo@host/tuner", "postgresql+psycopg"),
        ("postgresql+psycopg://gorgo@host/tuner", "postgresql+psycopg"),
        ("postgresql+pg8000://gorgo@host/tuner", "postgresql+pg8000"),
    ],
)
def test_postgresql_is_reached_by_psycopg_unless_said_within_five_seconds(
    url: str, driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(database, "create_engine", lambda url, **options: made.append((url.drivername, options)))
    open_engine(url)
    assert made == [(driver, {"poolclass": NullPool, "connect_args": {"connect_timeout": 5}})]


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:"])
def test_memory_is_no_history(url: str) -> None:
    with pytest.raises(HistoryError, match="memory is no history"):
        open_engine(url)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("database is locked", "another process writes to it and does not end; the tuner tries again"),
        ("database disk image is malformed", "the file is damaged; move it away, a new one is made"),
        ("Could not decode to UTF-8 column", "the file is damaged; move it away, a new one is made"),
        ("file is not a database", "this is another kind of file; name another one"),
        ("attempt to write a readonly database", "the file or its folder is read-only"),
        ("database or disk is full", "the disk is full; what was written before is safe"),
        ("disk I/O error", "the disk or a limit on file sizes refuses it; what was written before is safe"),
        ("unable to open database file", "the file or its folder cannot be opened"),
        ("something else", None),
    ],
)
def test_each_failure_of_a_database_has_its_advice(text: str, hint: str | None, tmp_path: Path) -> None:
    engine = open_engine(f"sqlite:///{tmp_path}/h.sqlite3")
    with pytest.raises(HistoryError) as raised, writing(engine):
        raise OperationalError("SELECT 1", {}, sqlite3.OperationalError(f"{text}\nand more"))
    assert str(raised.value) == f"{engine.url}: {text}" + ("" if hint is None else f" ({hint})")


def test_a_connection_that_broke_is_said() -> None:
    failure = OperationalError("SELECT 1", {}, sqlite3.OperationalError("gone"), connection_invalidated=True)
    assert database._reason(failure) == "gone (the connection broke)"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nonsense", "^'nonsense' is no database URL; expected sqlite:///FILE or postgresql://...$"),
        ("mysql://u:secret@h/d", r"^mysql://u:\*\*\*@h/d: "),
        ("sqlite:////nowhere/at/all.sqlite3", "^sqlite:////nowhere/at/all.sqlite3: there is no folder /nowhere/at$"),
    ],
)
def test_a_url_that_names_no_history_is_shown_without_its_password(url: str, words: str) -> None:
    with pytest.raises(HistoryError, match=words):
        open_engine(url)


def test_waits_for_a_database_are_five_seconds() -> None:
    assert (database.BUSY_TIMEOUT_S, database.CONNECT_TIMEOUT_S) == (5.0, 5)
