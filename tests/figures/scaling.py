"""The view of `python -m tests.bench.scaling`: a row per rule that says how many replicas are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from tests.figures.marked import Cell, Table, View

SEEDS = 3
#: The page's words for each rule.
RULES = {
    "gorgo_replicas_wanted": "`gorgo_replicas_wanted` for 95 %",
    "gorgo_replicas_wanted, warmed": "the same, new replicas warmed with 8 prompts",
    "HPA, utilisation 0.9": "an HPA on utilisation, target 0.9",
    "static 6": "nothing: 6 that stand",
}
COMMAND = f"python -m tests.bench.scaling runs/scaling {SEEDS} {' '.join(f'{name!r}' for name in RULES)}"


def scaling(results: Sequence[Any]) -> View:
    """Return the mean over the seeds of each figure, and the least share in time."""
    (runs,) = results
    rows: dict[tuple[str, ...], dict[str, Cell]] = {}
    values: dict[str, float] = {"seeds": float(SEEDS)}
    hours: dict[str, float] = {}
    for rule, words in RULES.items():
        found = [run for run in runs if run["rule"] == rule]
        hours[rule] = fmean(run["replica_hours"] for run in found)
        rows[words,] = {
            "first token within 8 s": [f(100 * run["attained"] for run in found) for f in (fmean, min)],
            "replicas, mean": fmean(run["mean_replicas"] for run in found),
            "replica hours": hours[rule],
            "p95 TTFT": fmean(run["ttft_ms_p95"] for run in found) / 1e3,
        }
    signal = hours["gorgo_replicas_wanted"]
    values |= {f"hours over {rule}": signal / each for rule, each in hours.items()}
    return View(tables=[Table(labels=("the number of replicas follows",), rows=rows)], values=values)
