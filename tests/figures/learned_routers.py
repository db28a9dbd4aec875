"""Learned routers beside their published figures: ratios by traffic and fleet, a column per policy; and means."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiments.systems import llm_d, lodestar
from tests.documents import tables
from tests.figures.marked import Cell, Table, View, numbers_of
from tests.figures.wording import LEARNED_ROUTERS, in_words

#: Groups and their options.
LODESTAR = {"lodestar": "--seeds 5"}
GROUPS = {"production": "--seeds 5"}
MOTIVATION = {"motivation": "--seeds 5"}
#: With KV events too.
ACCURACY = {"accuracy": "--seeds 5"}
#: Twice as many requests in a run.
LONG = {"lodestar-long": "--seeds 5 --scale 0.6"}
#: Prefills alone.
PREFILL = {"lodestar-prefill": "--seeds 5"}
#: Its traffic and its rates as published, and what the data of another policy is worth.
SHAPE = {"lodestar-shape": "--seeds 5"}
RATES = {"lodestar-rates": "--seeds 5"}
CIRCULAR = {"circular": "--seeds 5"}
#: Of half as many requests as the paper's.
POOLS = {"pools": "--seeds 5 --scale 1.6667"}
TAU = {"tau": "--seeds 5"}
ABLATIONS = {"guards": "--seeds 5 --scale 0.5", "shift": "--seeds 5 --scale 0.5"}
K_FILTER = {"k-filter": "--seeds 5"}
SHADOWS = {"shadows": "--seeds 5"}
LATER = {"scenarios": "--seeds 5"}
#: What fresh reports of engines are worth.
SCRAPES = {"scrapes": "--seeds 5"}
#: llm-d's guards.
GATES = {"gates": "--seeds 5"}
#: E2E per output token over the rate.
LADDERS = {"qps": "--seeds 5 --scale 0.5"}
MORE = {"lodestar-more": "--seeds 5"}


def commands(groups: Mapping[str, str]) -> list[str]:
    """Return a command per group."""
    return [f"python -m experiments --system {_system(name)} --only {name} {words}" for name, words in groups.items()]


def _system(group: str) -> str:
    return llm_d.NAME if group in llm_d.GROUPS else lodestar.NAME


_MEANS = (
    "mean TTFT, ms", "p50", "p95", "p99", "p50 E2E, s", "p95 E2E, s", "p50 TPOT, ms", "p99 TPOT, ms",
    "E2E per token, ms", "tokens/s", "hit %", "MAPE %", "failed", "rho", "share of pools, %", "decided by, %",
)  # fmt: skip
#: Columns of later results, at the end.
_ERRORS = ("model TTFT off, %", "median, %", "model TPOT off, %", "TPOT median, %")  # fmt: skip
_SUMMARY = re.compile(r"(\d+) of (\d+) claims met, all simulated; (\d+) runs")


def learned_routers(results: Sequence[Any]) -> View:
    """Return what the page may show of the commands' tables."""
    lines = [line for printed in results for line in printed]
    ratios: dict[tuple[str, ...], dict[str, Cell]] = {}
    means: dict[tuple[str, ...], dict[str, Cell]] = {}
    for printed in results:
        for header, rows in tables("\n".join(printed)):
            if header[1] == "of":
                for on, policy, against, figure, published, _, ratio, *_ in rows:
                    cells = ratios.setdefault((on, f"`{against}`", figure), {"published": ""})
                    cells[f"`{policy}`"] = [float(number) for number in numbers_of(ratio)]
                    cells["published"] = published or cells["published"]
            else:
                names = [name for name in _MEANS if name != "rho" or name in header]
                names += _ERRORS if "model TTFT off %" in header else ()
                for on, policy, seeds, *cells_of in rows:
                    shown = dict(zip(names, map(_value, cells_of), strict=True))
                    means[on, f"`{policy}`"] = {"seeds": float(seeds), **shown}
    full = {
        f"{figure} of full knowledge, {on}": cell[0]
        for (on, _, figure), row in ratios.items()
        if isinstance(cell := row.get("`oracle`"), list)
    }
    counts = [tuple(map(float, found.groups())) for line in lines if (found := _SUMMARY.search(line))]
    values = {
        name: sum(values)
        for name, values in zip(("claims met", "claims", "runs"), zip(*counts, strict=True), strict=True)
    }
    view = View(
        tables=[
            Table(labels=("on", "against", "figure"), rows=ratios),
            Table(labels=("on", "policy"), rows=means),
        ],
        lines=lines,
        values=values
        | full
        | {f"requests measured, {number}": measured for number, measured in enumerate(_measured(lines))},
    )
    return in_words(view, LEARNED_ROUTERS)


def _measured(lines: Sequence[str]) -> Iterator[float]:
    """Yield the measured requests of a run by group."""
    yield from (float(found[1]) for line in lines if (found := re.search(r"(\d+) measured requests", line)))


def _value(cell: str) -> Cell:
    if re.fullmatch(r"[-\d.]+ \[.*\]", cell):
        return [float(number) for number in numbers_of(cell)]
    try:
        return float(cell)
    except ValueError:
        return cell
