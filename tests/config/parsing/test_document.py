"""The YAML layer alone: plain data, lines, notation."""

from __future__ import annotations

import pytest

from gorgo.config.parsing.document import read_document, show_path, show_value


@pytest.mark.parametrize(
    ("text", "value"),
    [("3", 3), ("-0", 0), ("'3'", "3"), ("3.0", 3.0), ("1e3", 1000.0), (".5", 0.5), ("true", True), ("yes", "yes"),
     ("True", "True"), ("~", None), ("", None), ("''", ""), ("0x1F", "0x1F"), ("1_000", "1_000"), ("1:30", "1:30"),
     ("2026-01-01", "2026-01-01"), ("|\n  a\n  b", "a\nb"), ("1234567890123456789", 1234567890123456789.0),
     ("\u0663", "\u0663")],
)  # fmt: skip
def test_scalar_is_what_it_looks_like_and_nothing_cleverer(text: str, value: object) -> None:
    document = read_document(f"key: {text}".encode())
    assert document.data == {"key": value}
    assert isinstance(document.data, dict)
    assert type(document.data["key"]) is type(value)
    assert not document.problems


def test_every_place_has_its_line() -> None:
    document = read_document(b"a:\n  b: 1\nc:\n- d\n-\n  e: 2\n")
    places = {show_path(path): line for path, line in document.lines.items()}
    assert places == {"the file": 1, "a": 1, "a.b": 2, "c": 3, "c[0]": 4, "c[1]": 6, "c[1].e": 6}
    assert document.line(("c", 1, "missing")) == 6


def test_crlf_and_byte_order_mark_are_read() -> None:
    document = read_document(b"\xef\xbb\xbfa: 1\r\nb: 2\r\n")
    assert document.data == {"a": 1, "b": 2}
    assert document.line(("b",)) == 2


@pytest.mark.parametrize(
    ("value", "shown"),
    [({"a": 1}, "a mapping"), ([1], "a list"), ([], "an empty list"), (None, "null"), (True, "true"), (1.5, "1.5"),
     ("\u00e9\n", r"'\xe9\n'"), ("x" * 100, "'" + "x" * 56 + "...")],
)  # fmt: skip
def test_value_is_shown_on_one_short_line(value: object, shown: str) -> None:
    assert show_value(value) == shown
