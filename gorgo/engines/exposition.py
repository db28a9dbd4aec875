"""Gauges of Prometheus's text format: only the requested names, tolerant of everything else.

A full parser builds every sample of every histogram (thousands of lines per scrape, per replica) to read five gauges.

Theory of operation. An engine may be hostile, so the work is bounded by counts, whatever the text is. Each name is
found by a plain search, which is linear in the text. Regular expressions read the found lines alone, which are few and
short; a text with more of them is not read.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from gorgo.core.numeric import is_nonnegative, parse_number

#: Longest text that is read; SGLang's is about 100 kB.
MAX_TEXT = 4 * 1024 * 1024
#: Longest line of a requested name: an engine's settings as labels take one or two thousand characters.
MAX_LINE = 8 * 1024
#: Lines of requested names, and their characters in all: 64 data-parallel ranks of 8 tensor-parallel ones write six
#: each, of some 80 characters.
MAX_LINES, MAX_CHARACTERS = 4096, 512 * 1024
_LINE = re.compile(r"(?P<name>[A-Za-z_:][\w:]*+)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)", re.ASCII)
_LABEL = re.compile(r'(?<!\w)(?P<key>[A-Za-z_]\w*+)="(?P<value>(?:[^"\\]|\\.)*+)"', re.ASCII)
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
    for name, line in _selected(text, names):
        match = _LINE.match(line)
        if match is None or match["name"] != name:
            continue
        value = parse_number(match["value"])
        if is_nonnegative(value):
            yield name, match["labels"] or "", value


def _selected(text: str, names: Collection[str]) -> list[tuple[str, str]]:
    """Return the lines that start with one of `names`, name by name; none if they exceed a bound."""
    selected: list[tuple[str, str]] = []
    left = MAX_CHARACTERS
    if len(text) > MAX_TEXT:
        return []
    for name in names:
        start = 0 if text.startswith(name) else text.find("\n" + name) + 1
        found = start > 0 or text.startswith(name)
        while found:
            end = text.find("\n", start)
            end = len(text) if end < 0 else end
            left -= end - start
            if end - start > MAX_LINE or left < 0 or len(selected) == MAX_LINES:
                return []
            selected.append((name, text[start:end]))
            start = text.find("\n" + name, end) + 1
            found = start > 0
    return selected
