"""Text becomes markup in one place, and is escaped there."""

from __future__ import annotations

import doctest
from importlib import import_module
from pkgutil import iter_modules

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gorgo.live.admin.page
from gorgo.live.admin.page.charts import Html, joined, tag


@pytest.mark.parametrize("name", [module.name for module in iter_modules(gorgo.live.admin.page.__path__)])
def test_examples_give_what_they_say(name: str) -> None:
    assert doctest.testmod(import_module(f"gorgo.live.admin.page.{name}")).failed == 0


@given(st.text())
def test_no_text_begins_an_element_or_ends_an_attribute(text: str) -> None:
    made = tag("p", text, title=text, data_x=text)
    assert made.count("<") == made.count(">") == 2
    assert made.count('"') == 4


def test_markup_is_not_escaped_twice_and_what_is_computed_from_it_is_text_again() -> None:
    inner = tag("b", "a & b")
    assert tag("p", inner) == "<p><b>a &amp; b</b></p>"
    assert joined([inner, inner]) == inner * 2
    assert tag("p", inner.upper()).startswith("<p>&lt;B&gt;")
    assert isinstance(inner, Html)
    assert not isinstance(inner.upper(), Html)
