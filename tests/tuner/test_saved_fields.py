"""Fields of a saved state: what is taken, and what an error says of the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gorgo.errors import TunerError
from tuner.saved_fields import SavedFields


def of(value: object) -> SavedFields:
    return SavedFields({"a": value}, "saved thing")


def test_values_of_their_kinds_are_returned() -> None:
    assert (of(1.5).number("a"), of(3).number("a"), of(3).count("a"), of(True).flag("a")) == (1.5, 3.0, 3, True)
    assert (of(None).optional("a"), of(2).optional("a"), of(None).short_text("a"), of("b").short_text("a")) == (
        None,
        2.0,
        None,
        "b",
    )
    assert (of([1]).items("a", most=1), of({"b": 1}).numbers("a")) == ([1], {"b": 1.0})


@pytest.mark.parametrize(
    ("read", "value", "message"),
    [
        (lambda f: f.number("a"), True, "saved thing.a is True; expected a finite number"),
        (lambda f: f.number("a"), float("nan"), "saved thing.a is nan; expected a finite number"),
        (lambda f: f.number("a"), 10**400, "expected a finite number"),
        (lambda f: f.number("a"), "1", "saved thing.a is '1'; expected a finite number"),
        (lambda f: f.number("a", least=0, most=1), 2, "saved thing.a is 2; expected a finite number from 0 to 1"),
        (lambda f: f.count("a"), True, "saved thing.a is True; expected a whole number from 0"),
        (lambda f: f.count("a"), 1.0, "saved thing.a is 1.0; expected a whole number"),
        (lambda f: f.count("a", most=5), 6, "saved thing.a is 6; expected a whole number from 0 to 5"),
        (lambda f: f.flag("a"), 1, "saved thing.a is 1; expected true or false"),
        (lambda f: f.short_text("a"), "x" * 4097, "expected null or a text of at most 4096 characters"),
        (lambda f: f.items("a", most=1), [1, 2], "expected a list of at most 1 values"),
        (lambda f: f.numbers("a"), {"b": None}, "saved thing.a.b is None; expected a finite number"),
        (lambda f: f.inner("a"), [], r"saved thing.a is \[\]; expected an object"),
        (lambda f: f.number("b"), 1, "saved thing has no 'b'; expected one"),
    ],
)
def test_another_value_is_an_error_with_its_place_and_what_is_expected(
    read: Callable[[SavedFields], Any], value: object, message: str
) -> None:
    with pytest.raises(TunerError, match=message) as caught:
        read(of(value))
    assert len(str(caught.value)) < 200
