"""Fields of a saved state, read with checks: an error names the field, what it is, and what is expected.

The state is in a database that others may edit. A number that is not finite, or a count without a bound, would show
hours later, or never end.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from reprlib import repr as shortened
from typing import Any

from gorgo.errors import TunerError

#: Unix time, s: a campaign does not run for centuries.
MAX_TIME_S = 1e11
#: Generations, evaluations and requests of one window.
MAX_COUNT = 10**9
#: Names and reasons.
MAX_TEXT = 4096


class SavedFields:
    """The fields of one saved object.

    Parameters
    ----------
    value:
        As read from JSON.
    place:
        Its name in errors.

    Raises `TunerError` if `value` is no object, and for a wrong field.

    Example
    -------
    >>> SavedFields({"n": 3}, "saved window").count("n")
    3
    """

    def __init__(self, value: object, place: str) -> None:
        if not isinstance(value, Mapping):
            raise wrong(place, value, "an object")
        self._values: Mapping[str, object] = value
        self.place = place

    def number(self, name: str, *, least: float = -1e300, most: float = 1e300) -> float:
        """Return a finite number from `least` to `most`."""
        value = self.value(name)
        try:
            good = not isinstance(value, bool) and isinstance(value, int | float) and isfinite(value)
        except OverflowError:  # a whole number beyond every float
            good = False
        if not good or not least <= value <= most:  # type: ignore[operator] # checked in the line above
            raise self.wrong(name, _expected_number(least, most))
        return float(value)  # type: ignore[arg-type] # as above

    def optional(self, name: str, *, least: float = -1e300, most: float = 1e300) -> float | None:
        """Return a number as `number` does, or `None`."""
        return None if self.value(name) is None else self.number(name, least=least, most=most)

    def count(self, name: str, *, least: int = 0, most: int = MAX_COUNT) -> int:
        """Return a whole number."""
        value = self.value(name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.wrong(name, f"a whole number from {least} to {most}")
        return value

    def flag(self, name: str) -> bool:
        value = self.value(name)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def short_text(self, name: str) -> str | None:
        """Return a text or `None`."""
        value = self.value(name)
        if value is not None and not (isinstance(value, str) and len(value) <= MAX_TEXT):
            raise self.wrong(name, f"null or a text of at most {MAX_TEXT} characters")
        return value

    def numbers(self, name: str) -> dict[str, float]:
        """Return an object of finite numbers."""
        inner = self.inner(name)
        return {key: inner.number(key) for key in inner.names()}

    def items(self, name: str, *, most: int) -> list[Any]:
        """Return a list of at most `most` values."""
        value = self.value(name)
        if not isinstance(value, list) or len(value) > most:
            raise self.wrong(name, f"a list of at most {most} values")
        return value

    def inner(self, name: str) -> SavedFields:
        """Return the fields of an object."""
        return SavedFields(self.value(name), f"{self.place}.{name}")

    def names(self) -> list[str]:
        return [str(name) for name in self._values]

    def value(self, name: str) -> object:
        """Return a value unchecked; raise `TunerError` without one."""
        if name not in self._values:
            raise TunerError(f"{self.place} has no {name!r}; expected one")
        return self._values[name]

    def wrong(self, name: str, expected: str) -> TunerError:
        """Return the error of a field."""
        return wrong(f"{self.place}.{name}", self.value(name), expected)


def wrong(place: str, value: object, expected: str) -> TunerError:
    """Return the error of a value."""
    return TunerError(f"{place} is {shortened(value)}; expected {expected}")


def _expected_number(least: float, most: float) -> str:
    if (least, most) == (-1e300, 1e300):
        return "a finite number"
    return f"a finite number from {least:g} to {most:g}"
