"""The tables of the GORGO paper with one seed: its second run of April 7, with steady arrivals and with a surge of
load, and its comparisons with a random choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.systems.gorgo_paper import WITHIN
from gorgo.lab.rank import spearman
from tests.figures.marked import Cell, Table, View

COMMAND = "python -m experiments --system gorgo --only tables --seeds 1 --jobs 1 --json"
_HALF, _THIRD = (f"April 7, time scale {scale}, surge" for scale in (2, 3))


def paper_tables(results: Sequence[Any]) -> View:
    """Return both p95 of each policy at time scale 2: simulated with steady arrivals, with the surge, and measured."""
    (found,) = results
    steady, surge = _by_policy(found["half_load"]), _by_policy(found["surge"], window=_HALF)
    third = _by_policy(found["surge"], window=_THIRD)
    rows: dict[tuple[str, ...], dict[str, Cell]] = {
        (f"`{policy}`",): {
            figure: [simulated, surge[policy][figure][0], measured] for figure, (simulated, measured) in figures.items()
        }
        for policy, figures in steady.items()
    }
    values = {f"{one['on']}, {one['figure']}: {kind}": one[kind] for one in found["claims"]
              if one["against"] == "random" for kind in ("published", "simulated")}  # fmt: skip
    for name, one in (("steady", steady), ("surge", surge), ("surge, time scale 3", third)):
        pairs = [pair for figures in one.values() for pair in figures.values()]
        values[f"{name}: figures"] = len(pairs)
        values[f"{name}: within"] = sum(1 / WITHIN <= ours / theirs <= WITHIN for ours, theirs in pairs)
        values[f"{name}: order"] = _order(one)
    values |= {f"{policy}, E2E p99": third[policy]["E2E p99"][0] / third[policy]["E2E p99"][1] for policy in third}
    return View(tables=[Table(labels=("policy",), rows=rows)], values=values | {"within, %": round(100 * (WITHIN - 1))})


#: Policy to figure to what was simulated and measured.
_Figures = Mapping[str, Mapping[str, tuple[float, float]]]


def _by_policy(rows: Sequence[Any], *, window: str | None = None) -> _Figures:
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for row in rows:
        if window is None or row["window"] == window:
            found.setdefault(row["policy"], {})[row["figure"]] = (row["simulated"], row["measured"])
    return found


def _order(figures: _Figures) -> float:
    """Return the rank correlation of the p95 TTFT."""
    ours, theirs = zip(*(one["TTFT p95"] for one in figures.values()), strict=True)
    return spearman(np.array(ours), np.array(theirs)) or 0.0
