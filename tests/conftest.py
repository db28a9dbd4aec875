"""What holds for every test."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator

import pytest
from hypothesis import settings

from tests.left_out import left_out

# As the commands do, and before numpy is imported: tests share the processors.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

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


def pytest_collection_finish() -> None:
    """Take the tests themselves out of the collector's sight: each full collection over them took 0.4 s."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Generator[None]:
    """Below all reasons, one line says how many tests were skipped, and in part, and which commands run them."""
    yield
    found = terminalreporter.stats
    line = left_out(
        (report.longrepr[2] for report in found.get("skipped", [])),
        (report.message for report in found.get("warnings", [])),
    )
    if line is not None:
        terminalreporter.write_line(line, yellow=True)
