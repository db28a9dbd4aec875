"""Metrics texts of hostile engines: what is read of them, and how little of the processor they take."""

from __future__ import annotations

from time import thread_time

import pytest

from gorgo.engines.exposition import MAX_CHARACTERS, MAX_LINE, MAX_LINES, MAX_TEXT, read_gauges, read_series
from gorgo.engines.vllm import VLLM

#: Seconds of the processor for one text: hundreds of times the usual, a fraction of what a quadratic search takes.
LIMIT_S = 0.5


def test_name_that_starts_another_is_read_once() -> None:
    assert read_gauges("ab 1\na 2\nab_c 4\n", {"a", "ab"}) == {"a": 2.0, "ab": 1.0}


def test_first_and_last_line_are_read() -> None:
    assert read_gauges("a 1\nb 2", {"a", "b"}) == {"a": 1.0, "b": 2.0}


@pytest.mark.parametrize(
    "labels",
    [
        "a" * 8000,
        'a="' * 2600,
        'a="\\\\' * 1600,
        ", " * 4000,
        "," + " " * 8000,
        'a="b",' * 1300,
        "}" * 8000,
        "} " * 4000,
    ],
)
def test_labels_of_any_form_take_time_in_proportion_to_their_length(labels: str) -> None:
    line = f"vllm:cache_config_info{{{labels}}} 1\n"
    assert len(line) <= MAX_LINE
    text = line * (MAX_CHARACTERS // len(line))
    began = thread_time()
    VLLM().read_metrics(text)
    read_gauges(text, {"vllm:cache_config_info"})
    assert thread_time() - began < LIMIT_S


@pytest.mark.parametrize(
    "text",
    [
        "a{" + "x" * MAX_LINE + "} 1",
        "a 1\n" * (MAX_LINES + 1),
        ("a " + "1" * 1000 + "\n") * (MAX_CHARACTERS // 1000),
        "a 1\n" + "b 1\n" * (MAX_TEXT // 4),
    ],
)
def test_text_with_more_than_the_bounds_is_not_read(text: str) -> None:
    assert read_gauges(text, {"a"}) == {}
    assert read_series(text, {"a"}) == {}


def test_many_other_lines_hinder_nothing() -> None:
    other = 'engine_histogram_bucket{le="0.5"} 1\n'
    text = other * (MAX_TEXT // len(other) - 1) + "a 1\n"
    began = thread_time()
    assert read_gauges(text, {"a", "b", "c"}) == {"a": 1.0}
    assert thread_time() - began < LIMIT_S
