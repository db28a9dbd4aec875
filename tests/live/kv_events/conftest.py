"""A port of this machine that is free."""

from __future__ import annotations

import pytest

from tests.ports import free_port


@pytest.fixture
def unused_port() -> int:
    return free_port()
