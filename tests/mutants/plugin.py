"""A plugin for pytest: tests in the order that a file gives, or the lines that each test runs, into a file.

A file of an order is a JSON list of tests; every other test is left out. What a module or session fixture runs, and
what a test file runs on import, belongs to every test of the file: it stands under the file's name.
"""

from __future__ import annotations

import json
import os
import resource
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import coverage
import pytest
from coverage.numbits import nums_to_numbits

ORDER, TRACE = "GORGO_MUTANTS_ORDER", "GORGO_MUTANTS_TRACE"
TRACED = "gorgo", "tuner"
#: A fault may ask for memory without end; no test needs a tenth of this.
MEMORY_BYTES = 4 << 30


def pytest_configure(config: pytest.Config) -> None:
    if ORDER in os.environ:
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
        config.pluginmanager.register(Ordering(json.loads(Path(os.environ[ORDER]).read_text())))
    if TRACE in os.environ:
        config.pluginmanager.register(Tracing(Path(os.environ[TRACE])))


class Ordering:
    """Runs these tests, in this order."""

    def __init__(self, tests: list[str]) -> None:
        self._rank = {test: rank for rank, test in enumerate(tests)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in self._rank])
        wanted = [item for item in items if item.nodeid in self._rank]
        items[:] = sorted(wanted, key=lambda item: self._rank[item.nodeid])


class Tracing:
    """Writes `tests` (seconds and whether it passed) and `lines` (bits per source file, by test or test file)."""

    def __init__(self, out: Path) -> None:
        self._out, self._root = out, Path.cwd()
        self._tests: dict[str, tuple[float, bool]] = {}
        self._at = ""
        self._coverage = coverage.Coverage(data_file=None, config_file=False, source=[*TRACED])
        self._coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Generator[None, Any, Any]:
        return (yield from self._within(collector.nodeid if isinstance(collector, pytest.Module) else ""))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        return (yield from self._within(item.nodeid))

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
        return (yield from self._within(self._at if fixturedef.scope == "function" else self._at.split("::")[0]))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seconds, passed = self._tests.get(report.nodeid, (0.0, True))
        self._tests[report.nodeid] = seconds + report.duration, passed and report.passed

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        data, lines = self._coverage.get_data(), defaultdict[str, dict[str, str]](dict)
        for source in data.measured_files():
            by_context = defaultdict[str, list[int]](list)
            for line, contexts in data.contexts_by_lineno(source).items():
                for context in contexts:
                    by_context[context].append(line)
            for context, numbers in by_context.items():
                lines[context][Path(source).relative_to(self._root).as_posix()] = nums_to_numbits(numbers).hex()
        self._out.write_text(json.dumps({"tests": self._tests, "lines": lines}))

    def _within(self, context: str) -> Generator[None, Any, Any]:
        before, self._at = self._at, context
        self._coverage.switch_context(context)
        try:
            return (yield)
        finally:
            self._at = before
            self._coverage.switch_context(before)
