"""Bounds of a YAML file beside its length: keys and values, and the line that an error shows."""

from __future__ import annotations

from gorgo.config.document import MAX_LINE, MAX_NODES, excerpt, read_document


def test_keys_and_values_are_counted_before_they_are_read() -> None:
    assert read_document(b"[" + b"1," * (MAX_NODES - 1) + b"]").problems == []
    (problem,) = read_document(b"[" + b"1," * MAX_NODES + b"]").problems
    assert "too many keys and values" in str(problem)
    assert "65,536" in str(problem)


def test_line_of_an_error_is_searched_and_shown_up_to_its_bound() -> None:
    assert excerpt("a" * MAX_LINE, 1, 0)
    assert excerpt("auth" * 250_000, 1, 0) == ""
    (problem,) = read_document(b"a: [" + b"auth" * 250_000).problems
    assert len(str(problem)) < 200
