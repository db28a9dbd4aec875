"""Gauges of Prometheus's text format: only the requested names, in one pass, tolerant of everything else.

A full parser builds every sample of every histogram (thousands of lines per scrape, per replica) to read five gauges.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from gorgo.core.numeric import is_nonnegative

#: More than 64 data-parallel ranks write. A text of more is not read: the megabytes that an answer may have could be
#: millions of lines, and seconds in which nobody else is served.
MAX_LINES = 200_000
_LINE = re.compile(r"(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)", re.ASCII)
_LABEL = re.compile(r'(?P<key>[A-Za-z_]\w*)="(?P<value>(?:[^"\\]|\\.)*)"', re.ASCII)
_RANK = re.compile(r'(?:^|,)\s*dp_rank="(?P<rank>[^"]*)"')


def read_gauges(text: str, names: Collection[str]) -> dict[str, float]:
    """Each of `names` that the text has, summed over data-parallel ranks.

    Series of one rank that differ in other labels (a tensor-parallel rank) say the same thing twice, so the largest of
    them stands for the rank.

    >>> read_gauges('# TYPE a gauge\\na{dp_rank="0"} 1\\na{dp_rank="1"} 2.5\\nb 7', {"a"})
    {'a': 3.5}
    """
    by_rank: dict[str, dict[str, float]] = {}
    for name, labels, value in _lines(text, names):
        rank = _RANK.search(labels)
        ranks = by_rank.setdefault(name, {})
        key = "" if rank is None else rank["rank"]
        ranks[key] = max(value, ranks.get(key, value))
    return {name: sum(ranks.values()) for name, ranks in by_rank.items()}


@dataclass(frozen=True, slots=True)
class Series:
    """One line: its labels (escapes left as they are) and its value."""

    labels: Mapping[str, str]
    value: float


def read_series(text: str, names: Collection[str]) -> dict[str, list[Series]]:
    """Every line of each of `names` that the text has, for engines that tell things in labels.

    >>> read_series('a{b="x"} 1', {"a"})
    {'a': [Series(labels={'b': 'x'}, value=1.0)]}
    """
    found: dict[str, list[Series]] = {}
    for name, labels, value in _lines(text, names):
        pairs = {label["key"]: label["value"] for label in _LABEL.finditer(labels)}
        found.setdefault(name, []).append(Series(pairs, value))
    return found


def _lines(text: str, names: Collection[str]) -> Iterator[tuple[str, str, float]]:
    """Name, labels as text and value of each line with one of `names` and a usable value."""
    if text.count("\n") > MAX_LINES:
        return
    for line in text.split("\n"):
        match = _LINE.match(line)
        if match is None or match["name"] not in names:
            continue
        value = _number(match["value"])
        if value is not None:
            yield match["name"], match["labels"] or "", value


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if is_nonnegative(value) else None
