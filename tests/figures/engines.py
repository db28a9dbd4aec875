"""The group `engines` of the claims about the policies: a row per shape and engine, a column per share of hits."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from experiments.systems.policies import ENGINE_FILTERS as FILTERS
from tests.documents import tables
from tests.figures.marked import Cell, Table, View, numbers_of

SEEDS = 5
ENGINES = f"python -m experiments --system policies --only engines --seeds {SEEDS} --jobs 1"
#: Fleets and shares of a prefix that engines find, as the page names them; `sglang` was named `paper` at d092f24.
FLEETS = {"paper": "SGLang-like", "sglang": "SGLang-like", "vllm": "vLLM-like"}
HITS = {"": "all hits", "partial-hits-60": "60 % of hits"}
_COUNTS = re.compile(r"(\d+) of (\d+) targets met, all simulated; (\d+) runs, (\d+) s of processor time")


def engines(results: Sequence[Any]) -> View:
    (lines,) = results
    rows: dict[tuple[str, ...], dict[str, Cell]] = {}
    for header, found in tables("\n".join(lines)):
        if header[1] != "of":
            continue
        for on, _, _, measure, _, ratio, _ in found:
            shape, _, fleet, *hits = on.split(", ")
            cells = rows.setdefault((f"`{shape}`", FLEETS[fleet]), {})
            cells[f"{measure}, {HITS[''.join(hits)]}"] = [float(number) for number in numbers_of(ratio)]
    (counts,) = [match for line in lines if (match := _COUNTS.search(line))]
    names = ("targets met", "targets", "runs", "processor time, s")
    values = dict(zip(names, map(float, counts.groups()), strict=True))
    values |= {"seeds": float(SEEDS), "requests": float(FILTERS.limit or 0), "most tokens": 24_000.0, "target": 1.03}
    return View(tables=[Table(labels=("shape", "engines"), rows=rows)], values=values)
