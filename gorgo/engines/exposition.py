"""Gauges out of Prometheus's text format: only the names asked for, in one pass, tolerant of everything else.

A full parser builds every sample of every histogram (thousands of lines per scrape, per replica) to read five gauges.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from math import isfinite

_LINE = re.compile(r"(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)", re.ASCII)
_RANK = re.compile(r'(?:^|,)\s*dp_rank="(?P<rank>[^"]*)"')


def read_gauges(text: str, names: Collection[str]) -> dict[str, float]:
    """Each of `names` that the text has, summed over data-parallel ranks.

    Series of one rank that differ in other labels (a tensor-parallel rank) say the same thing twice, so the largest of
    them stands for the rank.

    >>> read_gauges('# TYPE a gauge\\na{dp_rank="0"} 1\\na{dp_rank="1"} 2.5\\nb 7', {"a"})
    {'a': 3.5}
    """
    by_rank: dict[str, dict[str, float]] = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None or match["name"] not in names:
            continue
        value = _number(match["value"])
        if value is None:
            continue
        rank = _RANK.search(match["labels"] or "")
        ranks = by_rank.setdefault(match["name"], {})
        key = "" if rank is None else rank["rank"]
        ranks[key] = max(value, ranks.get(key, value))
    return {name: sum(ranks.values()) for name, ranks in by_rank.items()}


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if isfinite(value) and value >= 0 else None
