"""Examples in docstrings are tests: pytest collects each of them, from all that is shipped."""

from __future__ import annotations

import doctest
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest

from tests.documents import ROOT

#: Lines of examples that the packages have at least; a release with fewer has lost some.
EXAMPLE_LINES = 200


def _lines() -> Counter[str]:
    """Lines that begin an example, by module of the shipped packages."""
    files = [path for package in ("gorgo", "tuner") for path in (ROOT / package).rglob("*.py")]
    counts = {path: path.read_text().count(">>> ") for path in files}
    return Counter({_module(path): count for path, count in counts.items() if count})


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_a_bare_run_of_pytest_collects_the_examples_of_both_packages(pytestconfig: pytest.Config) -> None:
    assert pytestconfig.getoption("doctestmodules")
    assert {"tests", "gorgo", "tuner"} <= set(pytestconfig.getini("testpaths"))


def test_every_example_is_where_it_is_collected_and_none_is_left_out() -> None:
    written = _lines()
    tests = [test for name in written for test in doctest.DocTestFinder().find(import_module(name), name)]
    runs = [
        (test.globs["__name__"], example)
        for test in tests
        for example in test.examples
        if doctest.SKIP not in example.options
    ]
    assert Counter(module for module, _ in runs) == written
    assert len(runs) >= EXAMPLE_LINES
