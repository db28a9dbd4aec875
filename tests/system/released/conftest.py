"""The environment of the authors' package, and the worker in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.system.environments import InstallError, released_environment
from tests.system.released.process import Released, released


@pytest.fixture(scope="session")
def authors() -> Iterator[Released]:
    try:
        environment = released_environment()
    except InstallError as error:
        pytest.skip(f"RELEASED PACKAGE TESTS SKIPPED: {error}")
    with released(environment) as worker:
        yield worker
