"""Numbers: their bounds, whether what came from outside can be counted with, and the types of arrays.

JSON's integers may have any number of digits and Python's reader takes `NaN`: the one is too large for a float, with an
error of its own, and the other is equal to nothing. Both pass for numbers by their type.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import isfinite, nan
from typing import TypeGuard

import numpy as np
from numpy.typing import NDArray

MAX_NUMBER = sys.float_info.max
#: Of tokens, requests or microseconds: more than any engine has; sums and products of a few are still finite.
MAX_AMOUNT = 2.0**53


def clamp(value: float, least: float, most: float) -> float:
    """Return the value within its bounds; NaN counts as too little. `min` and `max` take four times as long.

    >>> clamp(-1.0, 0.0, 2.0), clamp(1.5, 0.0, 2.0), clamp(9.0, 0.0, 2.0), clamp(float("nan"), 0.0, 2.0)
    (0.0, 1.5, 2.0, 0.0)
    """
    if not value > least:
        return least
    return most if most < value else value


def is_number(value: object) -> TypeGuard[int | float]:
    """A finite number of a size that a float has; a truth value is none.

    >>> is_number(10**400), is_number(float("nan")), is_number(True), is_number(7)
    (False, False, False, True)
    """
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER


def parse_number(text: str | None) -> float | None:
    """Return the finite number that a text from outside is; `None` if it is none.

    >>> parse_number("1e3"), parse_number("nan"), parse_number("many"), parse_number(None)
    (1000.0, None, None, None)
    """
    try:
        value = nan if text is None else float(text)
    except ValueError:
        return None
    return value if isfinite(value) else None


def none_if_nan(value: float) -> float | None:
    """Return a cell of a column, or `None` for an unknown one: JSON has no NaN.

    >>> none_if_nan(float("nan")), none_if_nan(2.0)
    (None, 2.0)
    """
    return None if value != value else float(value)


def is_nonnegative(value: object) -> TypeGuard[int | float]:
    """A number from 0 that something can come to.

    >>> is_nonnegative(0), is_nonnegative(-1), is_nonnegative(10**300)
    (True, False, False)
    """
    return is_number(value) and 0 <= value <= MAX_AMOUNT


def total(values: Sequence[object]) -> float | None:
    """The sum of amounts; unknown unless every one of them is an amount.

    >>> total([1, 2.5]), total([]), total([1, None]), total([1, -1]), total([1e308, 1e308])
    (3.5, 0.0, None, None, None)
    """
    amounts = [float(value) for value in values if is_nonnegative(value)]
    return sum(amounts, 0.0) if len(amounts) == len(values) else None


# Types of arrays, one name per type of element, and the length up to which a list is faster.


#: A number per replica, row or request; NaN is unknown.
Floats = NDArray[np.float64]
#: Factors of models, a row per outcome or candidate.
Table = NDArray[np.float32]
#: Rows of candidates, or slots of the columns.
Rows = NDArray[np.intp]
Mask = NDArray[np.bool_]

#: Most elements for which a loop over Python numbers takes less time than numpy, whose calls cost the same for one as
#: for fifty.
FEW = 8
