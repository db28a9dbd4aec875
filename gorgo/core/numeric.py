"""Numbers: their bounds, whether what came from outside can be counted with, and the types of arrays.

JSON's integers may have any number of digits and Python's reader takes `NaN`: the one is too large for a float, with an
error of its own, and the other is equal to nothing. Both pass for numbers by their type.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from math import isfinite, nan
from typing import Any, TypeGuard

import msgspec
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


def nan_if_none(value: float | None) -> float:
    """Return a number as it stands in a column: unknown is NaN.

    >>> nan_if_none(None), nan_if_none(2)
    (nan, 2.0)
    """
    return nan if value is None else float(value)


def in_ms(seconds: float | None) -> float | None:
    """Return seconds as milliseconds; unknown stays unknown."""
    return None if seconds is None else seconds * 1e3


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


# JSON to values: read by msgspec, and what that refuses by the standard library; and the cost of a parse beforehand.
#
# Owns `parse_json`, and which texts may be parsed at once on an event loop (`is_quick`).
#
# msgspec takes a fifth of the time for a short text, less than half for a long one. It accepts nothing that the
# standard library refuses, and reads it alike; a test compares the two. It refuses more: constants such as NaN, whole
# numbers beyond 64 bits, half surrogate pairs, encodings other than UTF-8. So which texts are accepted, and each error
# with its place, are the standard library's.


#: msgspec's own reading of a number near the ends of the range, such as 1.5e300, takes 16 us, forty times `float`'s: 64
#: KiB of them held the event loop for 90 ms.
_DECODER = msgspec.json.Decoder(float_hook=float)


def try_parse_json(text: bytes) -> Any:
    """Return the value of a text that msgspec reads; else `None`, as for a null.

    >>> try_parse_json(b"[1]"), try_parse_json(b"NaN")
    ([1], None)
    """
    try:
        return _DECODER.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def parse_json(text: bytes) -> Any:
    """Return the value of a JSON text. Raises as `json.loads` does: `ValueError` or `RecursionError`.

    >>> parse_json(b'{"a": [1, 2.5]}'), parse_json(b"NaN")
    ({'a': [1, 2.5]}, nan)
    """
    try:
        return _DECODER.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return json.loads(text)


# The cost of parsing JSON, by counts taken before: a parse cannot be interrupted, and it holds the whole process.
#
# Owns which texts are parsed at once on an event loop. Leaves what becomes of the others to the callers: refusal, or
# another process.
#
# Theory of operation. Plain text takes some 4 ns a byte, in a parse and in all that reads the result. A number, key or
# list takes up to a microsecond, of as few as two bytes. Each value but the first of its list or object follows a
# comma, and the first a bracket: the three counts bound the number of values, at a tenth of the parse's time.


#: Texts up to this length are not counted at all.
TINY_BYTES = 12 * 1024
#: Most objects: each part of a message that is one takes six microseconds to read.
QUICK_OBJECTS = 4000
#: Longest text, and most values, of a parse on an event loop: each takes less than 25 ms.
QUICK_BYTES = 4 * 1024 * 1024
QUICK_VALUES = 16_000


def count_values(text: bytes) -> int:
    """Return an upper bound on the values in a JSON text, less one; prose counts by its commas.

    >>> count_values(b'{"a": [1, 2], "b": "x, y"}')
    5
    """
    # numpy counts at four times the speed of `bytes.count`. Both brackets are 0x5b without the bit of lower case.
    data = np.frombuffer(text, dtype=np.uint8)
    return int(np.count_nonzero(data == 0x2C) + np.count_nonzero((data & 0xDF) == 0x5B))


def is_quick(text: bytes) -> bool:
    """Return whether a JSON text may be parsed on an event loop."""
    if len(text) <= TINY_BYTES:
        return True
    if len(text) > QUICK_BYTES:
        return False
    values = count_values(text)
    # Each object is a value: few values need no second count.
    return values <= QUICK_VALUES and (values <= QUICK_OBJECTS or _objects(text) <= QUICK_OBJECTS)


def _objects(text: bytes) -> int:
    return int(np.count_nonzero(np.frombuffer(text, dtype=np.uint8) == 0x7B))
