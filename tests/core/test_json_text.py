"""JSON by the quick parser and by the standard library: the same texts, the same values, the same errors."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.core.numeric import QUICK_BYTES, QUICK_OBJECTS, QUICK_VALUES, TINY_BYTES, count_values, is_quick, parse_json

TEXTS = [
    *(b"-0", b"-0.0", b"1e5", b"1E400", b"-1e-400", b"4.35", b"01", b"1.", b".5", b"+1", b"1e", b"9007199254740993.0"),
    *(b"9223372036854775808", b"-9223372036854775809", b"18446744073709551616", b"9" * 640, b"9" * 5000),
    *(b"2.2250738585072011e-308", b"1.7976931348623159e308", b"179769313486231570814527423731704356798070e267"),
    *(b"1.5e300", b"4.9e-324", b"1e999", b"-1.7976931348623157e308", b"1." + b"3" * 700),
    *(
        b"NaN",
        b"Infinity",
        b"-Infinity",
        b"nul",
        b"true",
        b"null",
        b"",
        b" ",
        b" 1 ",
        b"1 2",
        b"1\0",
        b"\x0b1",
        b"\x0c1",
    ),
    *(
        b'"\x01"',
        b'"\t"',
        b'"\x7f"',
        b'"a\0"',
        b'"\\u0000"',
        b'"\\x"',
        b'"\\/"',
        b'"\xe2\x80\xa8"',
        b'"\\u00e9\xc3\xa9"',
    ),
    *(b'"\\ud800"', b'{"\\ud800": 1}', b'"\\ud83d\\ude00"', b'"\xed\xa0\x80"', b'"\xff"', b'"\xc0\x80"'),
    *(b'"\xf4\x90\x80\x80"', b"\xef\xbb\xbf1", '{"a": "é"}'.encode("utf-16"), b'{"a":1,"a":2,"b":3}', b'{"":1}'),
    *(b"[1,]", b'{"a":1,}', b"{a:1}", b"{1:2}", b'{"a" :1}', b"[" * 500 + b"]" * 500, b"[" * 100_000),
]
WHOLE = json.dumps(
    {"model": "m", "messages": [{"content": "hé\\n \U0001f600"}, {"a": [1, -2.5e10, True, None, 10**20, {}]}], "t": 0.1}
).encode()
PIECES = [
    *(bytes([byte]) for byte in range(256)),
    *[
        b'"',
        b"\\",
        b"\\u",
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b"0",
        b"-",
        b"e",
        b".",
        b"NaN",
        b"\\ud8",
        b"\xed\xa0\x80",
    ]
    * 12,
]


def exactly(value: object) -> object:
    """Return a value with its types, order and bits."""
    if isinstance(value, dict):
        return [(key, exactly(member)) for key, member in value.items()]
    if isinstance(value, list):
        # Nested deeper than a comparison can be.
        return "nested" if len(value) == 1 and isinstance(value[0], list) else [exactly(member) for member in value]
    return (type(value), value.hex() if isinstance(value, float) else value)


def reading(parse: object, text: bytes) -> tuple[str, object]:
    assert callable(parse)
    try:
        return "value", exactly(parse(text))
    except RecursionError:
        return "error", "nested"
    except ValueError as error:
        return "error", (type(error), str(error))


def compared(text: bytes) -> str:
    """Assert that both read `text` alike; return whether the quick parser alone would."""
    assert reading(parse_json, text) == reading(json.loads, text), text
    return reading(msgspec.json.Decoder().decode, text)[0] if text[:1] != b"[" else "nested"


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: repr(text[:24]))
def test_a_text_has_the_value_or_the_error_of_the_standard_library(text: bytes) -> None:
    compared(text)


def test_changed_texts_and_numbers_are_read_alike() -> None:
    rng, found = random.Random(18), Counter[str]()
    for _ in range(4000):
        text = bytearray(WHOLE)
        for _ in range(rng.randint(1, 3)):
            place, kind = rng.randrange(len(text)), rng.random()
            text[place : place + (kind < 0.4) + 3 * (kind > 0.9)] = b"" if kind > 0.7 else rng.choice(PIECES)
        found[compared(bytes(text))] += 1
    for _ in range(4000):
        digits = ["".join(rng.choices("0123456789", k=rng.randint(1, most))) for most in (25, 25, 3)]
        number = f"{rng.choice(('', '-'))}{digits[0]}{rng.choice(('', '.' + digits[1]))}"
        found[compared(f"{number}{rng.choice(('', 'e', 'e+', 'e-'))}{digits[2]}".encode())] += 1
    assert min(found["value"], found["error"]) > 1000, "both happen"


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
