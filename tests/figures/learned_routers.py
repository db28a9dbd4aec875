"""Learned routers beside their published figures: ratios by traffic and fleet, a column per policy; and means."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tests.documents import tables
from tests.figures.marked import Cell, Table, View, numbers_of

#: Groups with their seeds: all of one would take hours.
SEEDS = {
    "lodestar": 3,
    "production": 1,
    "motivation": 1,
    "accuracy": 1,
    "k-filter": 1,
    "oracle": 1,
    "scenarios": 1,
    "guards": 1,
    "pools": 1,
    "shift": 1,
    "tau": 1,
}
OUT = "runs/learned-routers"
COMMANDS = [
    f"python -m gorgo.apps.learned_routers --only {name} --seeds {seeds} --out {OUT}" for name, seeds in SEEDS.items()
]
_MEANS = (
    "mean TTFT, ms", "p50", "p95", "p99", "p50 E2E, s", "p95 E2E, s", "p50 TPOT, ms", "p99 TPOT, ms",
    "E2E per token, ms", "tokens/s", "hit %", "MAPE %", "failed", "rho", "share of pools, %", "decided by, %",
)  # fmt: skip
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
                for on, policy, seeds, *cells_of in rows:
                    shown = dict(zip(_MEANS, map(_value, cells_of), strict=True))
                    means[on, f"`{policy}`"] = {"seeds": float(seeds), **shown}
    counts = [tuple(map(float, found.groups())) for line in lines if (found := _SUMMARY.search(line))]
    values = {
        name: sum(values)
        for name, values in zip(("claims met", "claims", "runs"), zip(*counts, strict=True), strict=True)
    }
    return View(
        tables=[
            Table(labels=("on", "against", "figure"), rows=ratios),
            Table(labels=("on", "policy"), rows=means),
        ],
        lines=lines,
        values=values | {f"seeds of {name}": float(seeds) for name, seeds in SEEDS.items()},
    )


def _value(cell: str) -> Cell:
    try:
        return float(cell)
    except ValueError:
        return cell
