"""JSON to values: read by msgspec, and what that refuses by the standard library; and the cost of a parse beforehand.

Owns `parse_json`, and which texts may be parsed at once on an event loop (`is_quick`).

msgspec takes a fifth of the time for a short text, less than half for a long one. It accepts nothing that the standard
library refuses, and reads it alike; a test compares the two. It refuses more: constants such as NaN, whole numbers
beyond 64 bits, half surrogate pairs, encodings other than UTF-8. So which texts are accepted, and each error with its
place, are the standard library's.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np

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
