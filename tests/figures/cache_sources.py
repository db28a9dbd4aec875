"""The views of cached tokens: sources side by side, and shares of hits by engine."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.systems.policies import ENGINE_FILTERS as FILTERS
from tests.documents import tables
from tests.figures.marked import Cell, Table, View, numbers_of
from tests.figures.wording import CACHE_SOURCES, in_words

# --- Sources of cached tokens side by side: a row per traffic, a column per source; targets, delays, shares over time.


COMMANDS = ["python -m experiments --system push-map --only sources --seeds 10"]
#: Groups stored by themselves: other code made them than the sources side by side.
GROUPS = {"faults": "push-map", "override": "ranvier", "replicas": "push-map", "depths": "ranvier"}
SCENARIOS = [f"python -m experiments --system {system} --only {name} --seeds 3" for name, system in GROUPS.items()]
#: The policy of the push-based cache map.
STICKY = ["python -m experiments --system push-map --only sticky --seeds 3"]
#: Every shape with and without events, stored by itself: minutes.
WORKLOADS = "python -m experiments --system push-map --only workloads --seeds 10"
#: First columns of the page, and the figures that each cell of such a table has.
SHOWN: Mapping[str, Sequence[str]] = {
    "p95 TTFT, ms / hit, %": ("p95", "hit, %"),
    "mean / p99 TTFT, ms / hit, %": ("mean TTFT, ms", "p99", "hit, %"),
    "phantom / missed, %": ("phantom, %", "missed, %"),
    "bytes a request": ("bytes a request",),
}
_SUMMARY = re.compile(r"All simulated; (\d+) runs")


def cache_sources(results: Sequence[Any]) -> View:
    """Return what the page may show of the commands' tables."""
    lines = [line for printed in results for line in printed]
    means: dict[str, dict[tuple[str, ...], dict[str, Cell]]] = {shown: {} for shown in SHOWN}
    targets: dict[tuple[str, ...], dict[str, Cell]] = {}
    delays: dict[tuple[str, ...], dict[str, Cell]] = {}
    times: dict[tuple[str, ...], dict[str, Cell]] = {}
    words: list[str] = []
    missed: dict[str, float] = {}
    for header, rows in (table for printed in results for table in tables("\n".join(printed))):
        for row in rows:
            cells = dict(zip(header, row, strict=True))
            if header[1] == "of":
                words.append(cells["met"])
                if cells["met"].startswith("missed"):
                    missed[" ".join(row[:4])] = _numbers(cells["of / against [95 %]"])[0]
                targets[tuple(row[:4])] = {
                    "target": cells["target"],
                    "ratio": _numbers(cells["of / against [95 %]"]),
                    "met": cells["met"],
                }
            elif header[0] == "evictions on":
                delays[tuple(row[:3])] = {name: float(cells[name]) for name in header[3:]}
            elif header[0] == "from, s":
                begins: dict[str, Cell] = {"begins": cells["begins"]}
                times[(row[0],)] = begins | {name: _numbers(cells[name]) for name in header[2:]}
            else:
                for shown, names in SHOWN.items():
                    figures = [cells[name] for name in names]
                    columns = means[shown].setdefault((cells["on"],), {})
                    # The first group with a row has it: others run the same traffic with faults.
                    columns.setdefault(cells["with"], None if "-" in figures else [float(figure) for figure in figures])
    view = View(
        tables=[
            *(Table(labels=(shown,), rows=rows) for shown, rows in means.items()),
            Table(labels=("on", "of", "against", "figure"), rows=targets),
            Table(labels=("evictions on", "with", "region"), rows=delays),
            Table(labels=("from, s",), rows=times),
        ],
        values=_counts(words)
        | missed
        | {"runs": float(sum(int(one) for line in lines for one in _SUMMARY.findall(line)))},
    )
    return in_words(view, CACHE_SOURCES)


def _counts(words: Sequence[str]) -> dict[str, float]:
    """Return how many targets there are, are met, and are missed by the whole interval."""
    judged = [word for word in words if word]
    return {
        "targets": float(len(judged)),
        "met": float(sum(word.startswith("pass") for word in judged)),
        "surely missed": float(judged.count("missed")),
    }


def _numbers(cell: str) -> list[float]:
    return [float(number) for number in numbers_of(cell)]


# --- The group `engines` of the claims about the policies: a row per shape and engine, a column per share of hits.


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
