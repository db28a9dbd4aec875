"""How a database is opened, and what its transactions lock."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.pool import NullPool

from gorgo.errors import HistoryError
from tuner.history import database
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
    engine = open_engine(f"sqlite:///{tmp_path}/h.sqlite3")
    with writing(engine) as connection:
        connection.exec_driver_sql("CREATE TABLE t (n INTEGER)")

    def write() -> None:
        with writing(engine) as connection:
            connection.exec_driver_sql("INSERT INTO t VALUES (1)")
            connection.exec_driver_sql("INSERT INTO nowhere VALUES (1)")

    with pytest.raises(HistoryError, match="no such table"):
        write()
    with reading(engine) as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM t").scalar() == 0


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
