"""A PostgreSQL server for a test run, where `make test-postgres` asks for it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.tuner.history.postgres_server import PostgresServer, find_binaries

WANTED = "GORGO_TEST_POSTGRES"


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    if not os.environ.get(WANTED):
        pytest.skip("PostgreSQL: run by `make test-postgres`")
    binaries = find_binaries()
    if binaries is None:
        pytest.skip("PostgreSQL: no initdb on this machine; install the distribution's package `postgresql`")
    with PostgresServer(binaries) as server:
        yield server
