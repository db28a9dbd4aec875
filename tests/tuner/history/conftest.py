"""Databases for the history's tests: SQLite always, PostgreSQL where `make test-postgres` asks for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tuner.history.postgres_server import PostgresServer, find_binaries
from tuner.history import History

WANTED = "GORGO_TEST_POSTGRES"


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    if not os.environ.get(WANTED):
        pytest.skip("PostgreSQL: run by `make test-postgres`")
    binaries = find_binaries()
    if binaries is None:
        pytest.skip("PostgreSQL: no initdb on this machine; install the distribution's package `postgresql`")
    with PostgresServer(binaries, tmp_path_factory.mktemp("postgres")) as server:
        yield server


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
