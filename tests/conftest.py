"""What holds for every test."""

from __future__ import annotations

import pytest
from hypothesis import settings

# The same examples on every run, and no limit on the time of one: the cores are shared, and a slow machine is no fault.
settings.register_profile("gorgo", derandomize=True, deadline=None)
settings.load_profile("gorgo")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test marked `system`, wherever it is, runs only where that was asked for."""
    if "system" in config.getoption("markexpr"):
        return
    for item in items:
        if item.get_closest_marker("system") and not item.get_closest_marker("skip"):
            item.add_marker(pytest.mark.skip(reason="system test: run by `make test-system`"))
