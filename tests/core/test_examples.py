"""The examples in docstrings run."""

from __future__ import annotations

import doctest
from importlib import import_module
from pkgutil import iter_modules

import pytest

import gorgo.core


@pytest.mark.parametrize("name", [module.name for module in iter_modules(gorgo.core.__path__)])
def test_examples_give_what_they_say(name: str) -> None:
    assert doctest.testmod(import_module(f"gorgo.core.{name}")).failed == 0
