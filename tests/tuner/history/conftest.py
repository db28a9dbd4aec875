"""Databases for the history's tests: SQLite always, PostgreSQL where `make test-postgres` asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tuner.history.postgres_server import PostgresServer
from tuner.history import History


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database of its own for each test."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/history.sqlite3"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.new_database()


@pytest.fixture
def history(url: str) -> Iterator[History]:
    opened = History(url)
    yield opened
    opened.close()
