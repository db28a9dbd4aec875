"""Counts that bound a parse: never less than the values of a text, whatever it is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.core.json_cost import (
    QUICK_BYTES,
    QUICK_OBJECTS,
    QUICK_VALUES,
    TINY_BYTES,
    count_values,
    is_quick,
)

texts = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=20,
)


def values_of(value: Any) -> int:
    members = value if isinstance(value, list) else value.values() if isinstance(value, dict) else ()
    return 1 + sum(map(values_of, members))


@given(texts, st.sampled_from([None, 1]))
def test_count_is_never_less_than_the_values(value: Any, indent: int | None) -> None:
    assert count_values(json.dumps(value, indent=indent).encode()) + 1 >= values_of(value)
    assert count_values(json.dumps(value, ensure_ascii=False).encode("utf-16")) + 1 >= values_of(value)


@pytest.mark.parametrize(
    ("text", "quick"),
    [
        (b"0," * (TINY_BYTES // 2), True),
        (b'"",' * QUICK_VALUES, True),
        (b'"",' * (QUICK_VALUES + 1), False),
        (b"{}," * (TINY_BYTES // 3), True),
        (b"{}, " * QUICK_OBJECTS, True),
        (b"{}, " * QUICK_OBJECTS + b"{}", False),
        (b"0," * (QUICK_VALUES + 1), False),
        (b"[" * (QUICK_VALUES + 1), False),
        (b'"' + b"x" * (QUICK_BYTES - 2) + b'"', True),
        (b'"' + b"x" * QUICK_BYTES + b'"', False),
        (b"a, " * QUICK_VALUES + b"x" * TINY_BYTES, True),
        (b"a, " * QUICK_VALUES + b"x" * TINY_BYTES + b",", False),
    ],
)
def test_long_texts_of_many_values_are_not_quick(text: bytes, quick: bool) -> None:
    assert is_quick(text) is quick
