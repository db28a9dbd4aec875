"""Whether what came from outside can be counted with.

JSON's integers may have any number of digits and Python's reader takes `NaN`: the one is too large for a float, with an
error of its own, and the other is equal to nothing. Both pass for numbers by their type.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TypeGuard

MAX_NUMBER = sys.float_info.max


def is_number(value: object) -> TypeGuard[int | float]:
    """A finite number of a size that a float has; a truth value is none.

    >>> is_number(10**400), is_number(float("nan")), is_number(True), is_number(7)
    (False, False, False, True)
    """
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER


def total(values: Sequence[object]) -> float | None:
    """The sum of amounts; unknown unless every one of them, and their sum, is a number from 0.

    >>> total([1, 2.5]), total([]), total([1, None]), total([1, -1]), total([1e308, 1e308])
    (3.5, 0.0, None, None, None)
    """
    amounts = [float(value) for value in values if is_number(value) and value >= 0]
    found = sum(amounts, 0.0)
    return found if len(amounts) == len(values) and is_number(found) else None
